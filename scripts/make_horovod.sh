#!/bin/sh
# Build Horovod 0.28.1 for MXNet 1.9.1, over gloo, into .venv-horovod; three minutes on two cores. Does nothing where that is done.
#
#   sh scripts/make_horovod.sh                     # tests that need it: .venv-horovod/bin/python -m pytest -k horovod
#   PYTHON=python3.12 sh scripts/make_horovod.sh   # another interpreter, 3.9 to 3.13
#
# From the system it needs a C++ compiler and make (Debian: g++ and make); CMake comes as a wheel.
set -eu
case "${1:-}" in -h | --help)
    sed -n '2,/^set/{s/^# \{0,1\}//p}' "$0"
    exit 0
    ;;
esac
cd "$(dirname "$0")/.."

stop() {
    echo "make_horovod.sh: $*" >&2
    exit 1
}

# ---- what can be seen to be missing before anything is fetched --------------------------------------------------------
install="install it: apt-get install g++ make (Debian, Ubuntu), dnf install gcc-c++ make (Fedora, RHEL)"
echo '#include <string>' | ${CXX:-c++} -x c++ -fsyntax-only - 2>/dev/null ||
    stop "Horovod is compiled, and ${CXX:-c++} is not here or does not compile C++; $install"
command -v make >/dev/null || stop "Horovod is built by make, which is not here; $install"

VENV=.venv-horovod REQUIREMENTS=requirements-horovod.txt sh scripts/make_venv.sh
python=$PWD/.venv-horovod/bin/python
if [ "$("$python" -c 'import importlib.metadata as m; print(*(d.version for d in m.distributions(name="horovod")))')" = 0.28.1 ]; then exit 0; fi

# ---- the build --------------------------------------------------------------------------------------------------------
# It asks the MXNet of this environment for its headers, and that imports on a newer Python or NumPy after gluon_parallel.
early=$(mktemp -d)
trap 'rm -rf "$early"' EXIT
echo "import gluon_parallel" >"$early/sitecustomize.py"
echo "building Horovod 0.28.1 in .venv-horovod (three minutes on two cores, once)"
# Without the cache: in it may be a Horovod that was built for something else.
PYTHONPATH=$early HOROVOD_CMAKE=$(dirname "$python")/cmake HOROVOD_WITH_MXNET=1 HOROVOD_WITH_GLOO=1 \
    HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 MAKEFLAGS="-j$(nproc)" \
    "$python" -m pip --disable-pip-version-check install --quiet --no-cache-dir --no-build-isolation --no-deps \
    --no-binary horovod horovod==0.28.1 || stop "Horovod was not built; the compiler's or the package index's error stands above"
"$python" -c 'import gluon_parallel, horovod.mxnet' || stop "Horovod was built, and does not import (see above)"
echo ".venv-horovod is ready: Horovod 0.28.1"
