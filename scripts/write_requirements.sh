#!/bin/sh
# Write requirements.txt: the versions that belong together, resolved anew from the ranges in setup.py. Needs uv and .venv.
#
#   sh scripts/write_requirements.sh
set -eu
cd "$(dirname "$0")/.."
EXTRAS='
import importlib.metadata as m
wanted = lambda condition: not condition or "all" in condition or "test" in condition
print(*(r.split(";")[0] for r in m.requires("gluon-parallel") if wanted(r.partition(";")[2])), sep="\n")'
.venv/bin/python -c "$EXTRAS" | uv pip compile --quiet --universal --python-version 3.9 --only-binary :all: --upgrade \
    --no-header --no-annotate --output-file requirements.tmp -
echo "# The versions that were tested together, for Python 3.9 to 3.13. Written by scripts/write_requirements.sh from the ranges in setup.py." >requirements.txt
sed -E "s/ and (implementation_name|platform_python_implementation|sys_platform) [!=]= '[A-Za-z]*'//g; s/( and| ;) python_full_version < '3.14'//" requirements.tmp >>requirements.txt
rm requirements.tmp
