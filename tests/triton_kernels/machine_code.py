"""What a kernel's code says of its speed: spills within loops, products that wait for each other,
when loads are issued, how much is stored at once, and where products find what they multiply.

A bound on registers (a launch's maxnreg) has the compiler set some values aside. Those that it
stores before a loop and loads behind it cost nothing that can be measured; within the loop they
would.
"""

import re
from collections.abc import Iterator

LABEL = re.compile(r"^(\.L_\w+):")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?P<when>@!?U?P\w+\s+)?(?P<what>.*?)\s*;")
BRANCH = re.compile(r"BRA.*`\((\.L_\w+)\)")
PRODUCTS = ("HGMMA", "HMMA")
LOCAL_MEMORY = ("LDL", "STL")


def product_loops(sass: str) -> Iterator[list[str]]:
    """The instructions of each loop that multiplies and has no such loop within (nvdisasm -c).

    Loops end where a jump backwards depends on something. One that does not comes from code behind
    the kernel's end, where warps wait for a barrier once more.
    """
    instructions: list[str] = []
    places: dict[str, int] = {}
    starts: list[int] = []
    for line in sass.splitlines():
        if label := LABEL.match(line.strip()):
            places[label[1]] = len(instructions)
        elif instruction := INSTRUCTION.match(line):
            instructions.append(instruction["what"])
            jump = BRANCH.match(instruction["what"])
            if jump and instruction["when"] and jump[1] in places:
                start = places[jump[1]]
                body = instructions[start:]
                if any(x.startswith(PRODUCTS) for x in body):
                    if not any(other >= start for other in starts):
                        yield body
                    starts.append(start)


def loop_spills(sass: str) -> int:
    """Loads and stores of spilled registers in loops that multiply."""
    return sum(x.startswith(LOCAL_MEMORY) for body in product_loops(sass) for x in body)


def serial_loops(sass: str) -> int:
    """Loops in which each of Hopper's products is waited for before the next is issued.

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
    names = [match["what"] for match in found if match]
    first = next((i for i, name in enumerate(names) if name.startswith("FMUL")), len(names))
    return sum(name.startswith("LDG") for name in names[first:])


def narrow_stores(sass: str) -> int:
    """Stores to global memory of less than 16 bytes a thread."""
    found = [INSTRUCTION.match(line) for line in sass.splitlines()]
    names = [match["what"] for match in found if match]
    return sum(name.startswith("STG") and ".128 " not in name for name in names)


def chained_products(ttir: str) -> int:
    """fp32 products that are summed behind what they are added to, as the compiler likes it.

    (Triton's IR is read, before it makes several products of one.)
    """
    found = re.findall(r"tt\.dot %\S+, %\S+, %(\w+).*? : tensor<\w+xf32> \*", ttir)
    return sum(not name.startswith("cst") for name in found)


def first_operands(ttgir: str) -> tuple[int, int]:
    """Hopper's products whose first operand is in shared memory, and those that have registers.

    A loop's products that take registers which do not change wait for each other; those of the
    probabilities, which change, do not. (Seen with ptxas 12.8; Triton's IR for GPUs is read.)
    """
    found = re.findall(r"warp_group_dot %.*? : (!ttg\.memdesc|tensor)<", ttgir)
    return found.count("!ttg.memdesc"), found.count("tensor")
