"""What a kernel's code says of its speed: spills within loops, products that wait for each other,
when loads are issued, how much is stored at once, and where products find what they multiply.

A bound on registers (a launch's maxnreg) has the compiler set some values aside. Those that it
stores before a loop and loads behind it cost nothing that can be measured; within the loop they
would.
"""

import re
from collections.abc import Iterator

LABEL = re.compile(r"^(\.L_\w+):")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;")
BRANCH = re.compile(r"BRA.*`\((\.L_\w+)\)")
PRODUCTS = ("HGMMA", "HMMA")
LOCAL_MEMORY = ("LDL", "STL")


def product_loops(sass: str) -> Iterator[list[str]]:
    """The instructions of each innermost loop that multiplies (nvdisasm -c)."""
    instructions: list[str] = []
    places: dict[str, int] = {}
    for line in sass.splitlines():
        if label := LABEL.match(line.strip()):
            places[label[1]] = len(instructions)
        elif instruction := INSTRUCTION.match(line):
            instructions.append(instruction[1])
            jump = BRANCH.match(instruction[1])
            if jump and jump[1] in places:  # backwards
                body = instructions[places.pop(jump[1]) :]
                inner = any(BRANCH.match(x) for x in body[:-1])
                if not inner and any(x.startswith(PRODUCTS) for x in body):
                    yield body


def loop_spills(sass: str) -> int:
    """Loads and stores of spilled registers in the innermost loops that multiply."""
    return sum(x.startswith(LOCAL_MEMORY) for body in product_loops(sass) for x in body)


def serial_loops(sass: str) -> int:
    """Innermost loops in which each of Hopper's products is waited for before the next is issued.

    ptxas does that where it finds too few registers for products in flight.
    """
    counts = [
        [sum(x.startswith(name) for x in body) for name in ("HGMMA", "WARPGROUP.DEPBAR")]
        for body in product_loops(sass)
    ]
    return sum(waits >= products > 0 for products, waits in counts)


def late_loads(sass: str) -> int:
    """Loads from global memory that a kernel issues behind its first multiplication in fp32."""
    found = [INSTRUCTION.match(line) for line in sass.splitlines()]
    names = [match[1] for match in found if match]
    first = next((i for i, name in enumerate(names) if name.startswith("FMUL")), len(names))
    return sum(name.startswith("LDG") for name in names[first:])


def narrow_stores(sass: str) -> int:
    """Stores to global memory of less than 16 bytes a thread."""
    found = [INSTRUCTION.match(line) for line in sass.splitlines()]
    return sum(bool(m) and m[1].startswith("STG") and ".128 " not in m[1] for m in found)


def first_operands(ttgir: str) -> tuple[int, int]:
    """Hopper's products whose first operand is in shared memory, and those that have registers.

    A loop's products that take registers which do not change wait for each other; those of the
    probabilities, which change, do not. (Seen with ptxas 12.8; Triton's IR for GPUs is read.)
    """
    found = re.findall(r"warp_group_dot %.*? : (!ttg\.memdesc|tensor)<", ttgir)
    return found.count("!ttg.memdesc"), found.count("tensor")
