"""Finding a wrong address in Hopper's machine code.

An asynchronous matrix product (wgmma) reads an operand from shared memory through a 64-bit
descriptor: the address in its low word, the layout in its high word. Where two products share a
staging buffer, ptxas 12.8 (which Triton 3.6 brings along) has been seen to add the carry of the low
word's sum to a register that is not zero, so that the second product reads with another layout:
silently wrong results for some shapes. (A register that nothing wrote before is no better: it is
zero only by luck.) The sum of a high word looks so:

    UIADD3.X UR13, URZ, 0x40000040, URZ, UP0

Its second operand must be zero: URZ, or a register whose last writer moved zero into it.
"""

import re

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;")
# High words of descriptors: layouts of 128, 64 and 32 bytes of swizzle, the latter two as the
# disassembler writes numbers with the sign bit set.
HIGH_WORD_SUM = re.compile(
    r"UIADD3\.X UR\d+, (?P<high>UR\w+), "
    r"(?:0x40000040|0x80000020|-0x7fffffe0|0xc0000010|-0x3ffffff0), URZ, UP\d"
)
UNIFORM_WRITE = re.compile(r"(?P<operation>\S+) (?P<to>UR\d+)(?:, (?P<operands>.*))?$")


def high_word_sums(sass: str) -> tuple[list[str], list[str]]:
    """The sums of high words in a disassembly (nvdisasm -c): all, and those not from zero."""
    matches = filter(None, map(INSTRUCTION.match, sass.splitlines()))
    instructions = [match[1] for match in matches]
    sums, broken = [], []
    for i, instruction in enumerate(instructions):
        found = HIGH_WORD_SUM.match(instruction)
        if not found:
            continue
        sums.append(instruction)
        if found["high"] == "URZ":
            continue
        writer = last_write(instructions[:i], found["high"])
        if writer is None or not is_zero(writer):
            broken.append(f"{instruction} <- {writer and writer[0]}")
    return sums, broken


def last_write(instructions: list[str], register: str) -> re.Match | None:
    """The last instruction that writes a uniform register, alone or as the upper of a pair."""
    pair = f"UR{int(register[2:]) - 1}"
    for instruction in reversed(instructions):
        write = UNIFORM_WRITE.match(instruction)
        if not write:
            continue
        wide = ".64" in write["operation"] or "WIDE" in write["operation"]
        if write["to"] == register or (wide and write["to"] == pair):
            return write
    return None


def is_zero(write: re.Match) -> bool:
    """Whether a write moves zero."""
    return write["operation"] == "UMOV" and write["operands"] == "URZ"
