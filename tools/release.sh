#!/usr/bin/env bash
# Build the sdist and the wheel of the last commit, and try them with several Pythons, each in a venv of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = --help ]; then
    cat <<'USAGE'
usage: tools/release.sh [PYTHON ...]

Puts the sdist and the wheel of the last commit into dist/, compares the wheel's files with git's, and for each PYTHON
(python3.11 python3.12 python3.13) installs the wheel, runs `megascale quickstart` in an empty folder, and the tests of
the unpacked sdist. Prints a table; the output is in build/release. The status is 1 if anything fails.

in the environment:
  STEPS  steps of the quickstart (240)
  TESTS  folders and files of tests (tests: all quick ones)
  JOBS   tests at a time (4)
USAGE
    exit
fi
[ $# -gt 0 ] || set -- python3.11 python3.12 python3.13
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH

work=$PWD/build/release
rm -rf "$work" dist
mkdir -p "$work"
status=0

# try PYTHON STEP COMMAND...: a row of the table, with the last line of the command's output.
try() {
    local python=$1 step=$2 log=$work/$(basename "$1")-$2.log start=$SECONDS result=passed
    shift 2
    "$@" >"$log" 2>&1 || { result=FAILED && status=1; }
    printf '%-11s  %-10s  %-6s  %5d s  %s\n' "$(basename "$python")" "$step" "$result" $((SECONDS - start)) \
        "$(tail -n 1 "$log" | cut -c 1-80)"
}

build() {
    git archive --prefix source/ HEAD | tar -x -C "$work" && "$1" -m venv "$work/build" &&
        "$work/build/bin/pip" install --quiet build &&
        "$work/build/bin/python" -m build --outdir dist "$work/source" # the wheel is built from the sdist
}

# Every file of the package, those of `configs`, which is a link in a checkout, and nothing else.
compare_files() {
    diff <(git ls-tree -r --name-only HEAD megascale configs | grep -v '^megascale/configs$' |
        sed -n 's#^configs/.*\.toml$#megascale/&#; /^megascale/p' | sort) \
        <("$1" -m zipfile --list dist/*.whl | sed 1d | cut -d ' ' -f 1 | grep -v '\.dist-info/' | sort) &&
        "$1" -m zipfile --list dist/*.whl | sed 1d | wc -l
}

quickstart() (
    mkdir "$1/empty" && cd "$1/empty" && "$1/bin/megascale" quickstart ${STEPS:+train.steps="$STEPS"}
)

tests() (
    read -ra selection <<<"${TESTS:-tests}"
    cd "$work"/megascale-* && "$1/bin/python" -m pytest --jobs "${JOBS:-4}" "${selection[@]}"
)

try "$1" build build "$1"
try "$1" files compare_files "$1"
tar -xzf dist/*.tar.gz -C "$work"
for python in "$@"; do
    venv=$work/$(basename "$python")
    try "$python" venv "$python" -m venv "$venv"
    try "$python" install "$venv/bin/pip" install -c constraints.txt dist/*.whl
    try "$python" quickstart quickstart "$venv"
    try "$python" dev "$venv/bin/pip" install -c constraints.txt "$(echo dist/*.whl)[dev]"
    try "$python" tests tests "$venv"
done
exit "$status"
