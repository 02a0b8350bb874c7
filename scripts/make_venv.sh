#!/bin/sh
# Make .venv and install what gluon_parallel needs: wheels only, with a compiler among them for its C library. Does
# nothing where that is done, and builds the C library alone where only C files have changed.
#
#   sh scripts/make_venv.sh                        # `make venv`
#   PYTHON=python3.12 sh scripts/make_venv.sh      # another interpreter; .venv is made anew if it was another one's
#   MXNET=mxnet-cu117 sh scripts/make_venv.sh      # MXNet's build for NVIDIA GPUs, with the libraries of CUDA 11
#
# UV=      (empty) uses Python's own venv and pip although uv is there
# VENV=    another folder than .venv
# CC=     a C compiler that is here, e.g. CC=gcc, instead of ziglang's
# REQUIREMENTS=  another list of packages than requirements.txt, e.g. one with an older NumPy
set -eu
case "${1:-}" in -h | --help)
    sed -n '2,/^set/{s/^# \{0,1\}//p}' "$0"
    exit 0
    ;;
esac
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
MXNET=${MXNET:-}
REQUIREMENTS=${REQUIREMENTS:-requirements.txt}
UV=${UV-$(command -v uv || true)}

stop() {
    echo "make venv: $*" >&2
    exit 1
}

# ---- which Python ---------------------------------------------------------------------------------------------------
# Prints "3.12.1 /usr" for a Python that can be used, nothing for a command that is not there or does not start.
identity='import sys; print("%d.%d.%d" % sys.version_info[:3], getattr(sys, "base_prefix", sys.prefix))'
identify() { "$1" -c "$identity" 2>/dev/null || true; }
suitable() { case "$1" in 3.9.* | 3.10.* | 3.11.* | 3.12.* | 3.13.*) true ;; *) false ;; esac; }

installed=""
if [ -x "$VENV/bin/python" ]; then installed=$(identify "$VENV/bin/python"); fi

if [ -n "${PYTHON:-}" ]; then
    wanted=$(identify "$PYTHON")
    if [ -z "$wanted" ]; then  # a shim of pyenv, say, of a version that is not chosen: it says which ones it has
        said=$({ "$PYTHON" -c "$identity" 2>&1 >/dev/null || true; } | tr -s '[:space:]' ' ' | cut -c 1-400)
        stop "PYTHON=$PYTHON does not start a Python here (${said:-it says nothing}); name one of version 3.9 to 3.13, e.g. PYTHON=/usr/bin/python3"
    fi
    suitable "$wanted" || stop "PYTHON=$PYTHON is Python ${wanted%% *}; MXNet 1.9.1 and its companions run on 3.9 to 3.13, so name one of those, e.g. PYTHON=python3.12"
elif suitable "$installed"; then
    PYTHON=$VENV/bin/python wanted=$installed
else
    for PYTHON in python3 python python3.13 python3.12 python3.11 python3.10 python3.9 ""; do
        [ -n "$PYTHON" ] || stop "no Python 3.9 to 3.13 is on PATH; install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3.12"
        wanted=$(identify "$PYTHON")
        if suitable "$wanted"; then break; fi
    done
fi

# ---- what can be seen to be missing before anything is fetched --------------------------------------------------------
"$PYTHON" -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null ||
    stop "MXNet needs the system library libgomp.so.1, which is not here; install it: apt-get install libgomp1 (Debian, Ubuntu), dnf install libgomp (Fedora, RHEL)"
"$PYTHON" -c 'import platform, sys; sys.exit(platform.libc_ver()[0] != "glibc")' ||
    stop "MXNet's wheels need a Linux with the GNU C library, which this is not (Alpine has musl); use a Debian, Ubuntu, Fedora or RHEL image"
if [ -z "$UV" ]; then
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "Python ${wanted%% *} came without its venv and ensurepip modules; install them (Debian, Ubuntu: apt-get install python3-venv) or install uv"
fi

# ---- the environment --------------------------------------------------------------------------------------------------
stamp="$wanted $(cat setup.py pyproject.toml requirements-mxnet.txt requirements.txt "$REQUIREMENTS" scripts/make_venv.sh gluon_parallel/mxnet/cuda/wheels.py | cksum)"
if [ "$installed" = "$wanted" ] && [ "$(cat "$VENV/.installed" 2>/dev/null)" = "$stamp" ]; then
    if [ -z "$MXNET" ] || [ "$(cat "$VENV/.mxnet")" = "$MXNET" ]; then
        "$VENV/bin/python" gluon_parallel/native/build.py --if-changed || stop "the C library was not built (see above)"
        exit 0
    fi
fi

# Somebody else's pip is told of a package index by PIP_INDEX_URL, which uv does not read.
if [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"; fi

if [ "$installed" != "$wanted" ]; then
    if [ -e "$VENV" ]; then
        [ -e "$VENV/pyvenv.cfg" ] || stop "$VENV is there and is not a virtual environment; move it away, or choose another folder: VENV=folder"
        rm -rf "$VENV"
    fi
    echo "making $VENV with Python ${wanted%% *}"
    if [ -n "$UV" ]; then "$UV" venv --quiet --python "$("$PYTHON" -c 'import sys; print(sys.executable)')" "$VENV"; else "$PYTHON" -m venv "$VENV"; fi
fi
rm -f "$VENV/.installed"

if [ -n "$UV" ]; then
    install() { "$UV" pip install --quiet --python "$VENV/bin/python" "$@"; }
    uninstall() { "$UV" pip uninstall --quiet --python "$VENV/bin/python" "$@"; }
else
    install() { "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }
    uninstall() { "$VENV/bin/python" -m pip uninstall --quiet --yes "$@"; }
    # The pip that came with an old Python knows neither today's wheels nor editable installs without setup.py.
    install 'pip>=24,<27' || stop "pip was not updated (see above): its package index could not be reached"
fi

# A build of MXNet that somebody chose (mxnet-cu117, ...) fills the same folder as `mxnet`; it stays, unless another is named.
there=$("$VENV/bin/python" -c 'import importlib.metadata as m; print(*sorted({str(d.metadata["Name"]).replace("_", "-") for d in m.distributions()}))' |
    tr ' ' '\n' | grep -x -e mxnet -e 'mxnet-cu.*' || true)
chosen=$(echo "$there" | grep mxnet-cu | head -n 1 || true)
MXNET=${MXNET:-${chosen:-mxnet}}
wheels=$("$VENV/bin/python" gluon_parallel/mxnet/cuda/wheels.py "$MXNET")
echo "installing $MXNET and the packages of $REQUIREMENTS into $VENV ($([ -n "$wheels" ] && echo 2.6 GB || echo "some 450 MB to fetch, 1.4 GB on the disk"), once)"
fetched="were not installed (see above): the package index could not be reached, or it has no wheel for this machine"
install --only-binary :all: -r "$REQUIREMENTS" || stop "the packages of $REQUIREMENTS $fetched"
if [ "$chosen" = "$MXNET" ]; then
    grep -v '^mxnet==' requirements-mxnet.txt >"$VENV/requirements-mxnet.txt"
else
    if [ -n "$there" ] && [ "$there" != "$MXNET" ]; then
        # A name that is mistyped must not cost the build that is there.
        install --dry-run --only-binary :all: --no-deps "$MXNET==1.9.1" >/dev/null || stop "there is no $MXNET 1.9.1 (see above), so $there stays; name mxnet, mxnet-cu112 or mxnet-cu117"
        uninstall $there
    fi
    sed "s/^mxnet==/$MXNET==/" requirements-mxnet.txt >"$VENV/requirements-mxnet.txt"
fi
install --only-binary :all: --no-deps -r "$VENV/requirements-mxnet.txt" || stop "$MXNET and GluonCV $fetched"
[ -z "$wheels" ] || install --only-binary :all: --no-deps $wheels || stop "the libraries of CUDA 11 $fetched"
install --no-deps --no-build-isolation --editable . || stop "gluon_parallel was not installed (see above)"

# What is still missing (NVIDIA's driver, say) is told by the first import, in its last line.
message=$("$VENV/bin/python" -c 'import gluon_parallel' 2>&1) || stop "$(echo "$message" | tail -n 1)"

echo "$MXNET" >"$VENV/.mxnet"
echo "$stamp" >"$VENV/.installed"
echo "$VENV is ready: Python ${wanted%% *}, $("$VENV/bin/python" -c 'import importlib.metadata as m; print("NumPy", m.version("numpy"))'), $MXNET 1.9.1"
