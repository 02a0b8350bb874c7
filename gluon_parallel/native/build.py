"""Build of the C library: compiles the C files of this folder; imports nothing of the package, so setup.py can run it.

    python gluon_parallel/native/build.py              # the library that Python loads, by ziglang's compiler
    CC=gcc python gluon_parallel/native/build.py       # by a compiler of the system
    python gluon_parallel/native/build.py --debug      # for gdb: -O1, debug information and frame pointers
    CC=gcc python gluon_parallel/native/build.py --sanitize address,undefined   # another file, which only tests load

It prints what the compiler prints: nothing, if all is well. A `[note]` in the first line of a C file chooses its flags:
see `_flags`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NATIVE = Path(__file__).resolve().parent
NAME = "libgluon_parallel.so"
ZIGLANG = "ziglang>=0.16,<0.18"  # a C compiler as a wheel; before 0.16, it used no registers of 512 bits

_COMMON = ["-std=c11", "-D_GNU_SOURCE", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=fast",
           "-fno-math-errno", "-Wall", "-Wextra"]  # fmt: skip
_LIBRARIES = ["-lm", "-lpthread", "-ldl", "-lc"]
_FAST, _DEBUG = ["-O3", "-g0"], ["-O1", "-g", "-fno-omit-frame-pointer"]
_IN_ANY_ORDER = ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mprefer-vector-width=512"]
_PROCESSORS: dict[str, list[str]] = {"baseline": []}
if platform.machine() == "x86_64":
    _PROCESSORS.update(avx2=_AVX2, avx512=_AVX512)


class BuildFailed(Exception):
    """The library was not built; the message is a sentence with what to run."""


def sources() -> str:
    """Hash of the files that the library is built from."""
    found = hashlib.sha256()
    for path in sorted([*NATIVE.glob("[!.]*.[ch]"), NATIVE / "build.py"]):
        found.update(b"%s %d\n" % (path.name.encode(), path.stat().st_size) + path.read_bytes())
    return found.hexdigest()[:16]


def is_current(library: Path) -> bool:
    """Whether the library can be loaded, and was built from the files that are here now, not for debuggers."""
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return sources().encode() + b"\0" in library.read_bytes()


def platform_tag() -> str:
    """The systems that the library runs on, as in a wheel's name."""
    return f"{'linux' if os.environ.get('CC') else 'manylinux2014'}_{platform.machine()}"


def build(library: Path = NATIVE / NAME, debug: bool = False, sanitizers: str = "") -> None:
    """Compile all C files, and put the library in the place of the one that is there.

    Raises:
        BuildFailed: there is no compiler, or it fails.
    """
    slow = debug or bool(sanitizers)
    mode = [*(_DEBUG if slow else _FAST), *([f"-fsanitize={sanitizers}"] if sanitizers else [])]
    command = [*compiler(sanitizers), *mode]
    no_runtime = [] if os.environ.get("CC") else ["-nostdlib"]  # zig would first compile its own, which takes 10 s
    complete = [] if sanitizers else ["-Wl,-z,defs"]
    with tempfile.TemporaryDirectory(prefix="gluon_parallel-") as name:
        folder = Path(name)
        objects = compile_files(folder, command, " for debuggers" * slow)
        linked = folder / NAME
        options = ["-shared", *no_runtime, *complete, "-o", str(linked), *map(str, objects), *_LIBRARIES]
        _run([*command, *options], folder)
        library.parent.mkdir(parents=True, exist_ok=True)
        new = library.with_name(f"{library.name}.{os.getpid()}")
        try:
            shutil.copy(linked, new)
            new.replace(library)  # a process that has loaded the old one keeps it
        finally:
            new.unlink(missing_ok=True)


def compile_files(folder: Path, command: list[str], note: str = "") -> list[Path]:
    """Compile all C files, as many at a time as there are cores; returns their object files, which are in `folder`.

    The library tells the hash of its sources, and `note` behind it.
    """
    commands = {
        folder / f"{source.stem}{version}.o": [*command, *flags, "-c", str(source)]
        for source in sorted(NATIVE.glob("[!.]*.c"))
        for version, flags in _flags(source, sources() + note).items()
    }
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda output: _run([*commands[output], "-o", str(output)], folder), commands))
    return list(commands)


def _flags(source: Path, built_from: str) -> dict[str, list[str]]:
    """The compiler's flags for each version of a C file, by the suffix of its object file.

    `[per processor]` in its first line: one version for each kind of processor, which the macro PROCESSOR names; also
    for the types float and double, the macro REAL, with `[per processor and type]`. `[sums in any order]`: the compiler
    may change the order of additions, which it must to use vector instructions.
    """
    first = source.read_text("utf-8").partition("\n")[0]
    flags = [*_COMMON, *(_IN_ANY_ORDER if "[sums in any order]" in first else []), f'-DSOURCES="{built_from}"']
    if "[per processor" not in first:
        return {"": flags}
    types = ("-float", "-double") if " and type]" in first else ("",)
    return {
        f"{real}-{name}": [*flags, *more, f"-DPROCESSOR={name}", f"-DREAL={real[1:]}"]
        for real in types
        for name, more in _PROCESSORS.items()
    }


def compiler(sanitizers: str = "") -> list[str]:
    """The command of the C compiler that `CC` names, or of ziglang's."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    if sanitizers:
        raise BuildFailed("ziglang has no sanitizers for a library: name a compiler that has them, e.g. CC=gcc")
    ziglang = importlib.util.find_spec("ziglang")
    if ziglang is None or ziglang.origin is None:
        raise BuildFailed(f"there is no C compiler: `pip install '{ZIGLANG}'`, or name one that is here, e.g. CC=gcc")
    return [str(Path(ziglang.origin).with_name("zig")), "cc", "-target", f"{platform.machine()}-linux-gnu.2.17"]


def _run(command: list[str], folder: Path) -> None:
    """Run the compiler; zig writes its cache to `folder`, for a user may have no home."""
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(folder), "ZIG_LOCAL_CACHE_DIR": str(folder)}
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)  # fmt: skip
    except OSError as error:
        raise BuildFailed(f"the compiler {command[0]!r} does not start ({error.strerror}): name one that is here, e.g. "
                          f"CC=gcc, or leave out CC and `pip install '{ZIGLANG}'`") from None  # fmt: skip
    print(done.stdout, end="", file=sys.stderr)
    if done.returncode:
        raise BuildFailed(f"{shlex.join(command)} ended with status {done.returncode}, see its messages above; name "
                          "another compiler, e.g. CC=gcc")  # fmt: skip


def main() -> None:
    """Build as the command's arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--if-changed", action="store_true", help="only if a file that it is built from has changed")
    parser.add_argument("--debug", action="store_true", help="for debuggers: less optimised, with debug information")
    parser.add_argument("--sanitize", default="", metavar="NAMES", help="address,undefined or thread; needs CC")
    parser.add_argument("--output", type=Path, help="another file than the one that Python loads")
    options = parser.parse_args()
    suffix = f"-{options.sanitize}" if options.sanitize else ""
    library = options.output or NATIVE / f"libgluon_parallel{suffix}.so"
    try:
        if not (options.if_changed and is_current(library)):
            build(library, options.debug, options.sanitize)
    except BuildFailed as error:
        sys.exit(f"build.py: {error}")


if __name__ == "__main__":
    main()
