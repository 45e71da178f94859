#!/usr/bin/env bash
# The project's chores, one word each. Every one sets up what it needs first, which takes no time once it is done.
#
#   ./do setup          create .venv and install the package into it
#   ./do demo           train a small GPT on two ranks, parameters sharded
#   ./do test [--wide]  lint, types, and the tests; --wide: every case of every one
#   ./do test ARGS      the same with these arguments of pytest
#   ./do lint           ruff: rules and format
#   ./do types          mypy, strict
#   ./do bench [NAME ARGS]  run a benchmark, as in ./do bench steps/compare; without a name: list them
#   ./do libraries      test what people use beside a model, with other libraries (installs them)
#   ./do docs           build the documentation into site/
#   ./do build          a wheel with the kernels and a source distribution, into dist/
#   ./do fuzz [SECONDS] [SEED]  random combinations against plain PyTorch; what fails is made small
#   ./do clean          remove .venv and what was built
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

VENV=.venv
PYTHON=$VENV/bin/python
LOG=$VENV/setup.log

# Hundreds of processes start in the tests, and must not each compile the same sources, whatever the caller wants: what one
# has imported the others find compiled.
unset PYTHONDONTWRITEBYTECODE

say() { printf '%s\n' "$*" >&2; }

die() {
    say "do: $*"
    exit 1
}

# What an installation depends on. A change of any of it, or a checkout that moved, installs again.
fingerprint() {
    {
        pwd
        cat pyproject.toml setup.py constraints.txt
        find src -path '*/kernels/*.[ch]' | sort | xargs -r cat
    } | sha256sum | cut -d' ' -f1
}

# Runs a step of the set-up: one line on the terminal, the rest in the log, shown only if the step fails.
step() {
    local title=$1
    shift
    say "  $title"
    if ! "$@" >>"$LOG" 2>&1; then
        tail -n 30 "$LOG" >&2
        die "this failed: $* (the whole log: $LOG)"
    fi
}

# Where python3's packages lie and the version of its torch, if that sees a GPU and is recent enough: it was built for
# the driver here. Folders, since python3 may itself be of a virtual environment, which --system-site-packages skips.
gpu_torch() {
    [ -e /dev/nvidiactl ] || return 0
    python3 - <<'PY' 2>/dev/null || true
import importlib.metadata, site
import torch
version = importlib.metadata.version("torch")
if torch.cuda.is_available() and tuple(map(int, version.split(".")[:2])) >= (2, 11):
    print(version, *site.getsitepackages(), site.getusersitepackages(), sep="\n")
PY
}

create_venv() {
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        die "python3 is missing or older than 3.11"
    mkdir -p "$VENV"
    touch "$VENV/.unfinished"
    local found
    found=$(gpu_torch)
    if [ -n "$found" ]; then
        step "creating $VENV over python3's torch ${found%%$'\n'*}" python3 -m venv "$VENV"
        # Python 3.11 puts an old setuptools into a new environment, which would hide python3's own.
        "$PYTHON" -m pip uninstall --yes setuptools >>"$LOG" 2>&1
        printf 'torch==%s\n' "${found%%$'\n'*}" >"$VENV/constraints.txt"
        printf '%s\n' "${found#*$'\n'}" >"$(echo "$VENV"/lib/python3*/site-packages)/python3.pth"
    else
        step "creating $VENV" python3 -m venv "$VENV"
    fi
    rm "$VENV/.unfinished"
}

# What the package needs, and what these extras of it need: one a line.
requirements() {
    "$PYTHON" - "$@" <<'PY'
import re, sys, tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]


def needs(extra):
    for one in project["optional-dependencies"][extra]:
        own = re.fullmatch(r"zeroshard\[(.+)\]", one)  # an extra that names others
        yield from (need for name in own[1].split(",") for need in needs(name)) if own else [one]


print(*project["dependencies"], *(need for extra in sys.argv[1:] for need in needs(extra)), sep="\n")
PY
}

# install CONSTRAINTS ISOLATION EXTRA...: the package's kernels are compiled while what it needs is installed, each on a core.
# Nothing is compiled to byte code: most of it is never imported.
install() {
    local constraints=$1 isolation=$2 failed=0 own
    shift 2
    local pip=("$PYTHON" -m pip install --disable-pip-version-check --no-input --no-compile --constraint "$constraints")
    requirements "$@" >"$VENV/requirements.txt" || return 1
    "${pip[@]}" $isolation --no-deps --editable . >"$VENV/kernels.log" 2>&1 &
    own=$!
    "${pip[@]}" --requirement "$VENV/requirements.txt" || failed=1
    wait "$own" || failed=1
    cat "$VENV/kernels.log"
    return $failed
}

# setup EXTRA...: installs the package with these extras, unless that was done before.
setup() {
    local extras stamp now
    extras=$(IFS=,; echo "$*")
    stamp=$VENV/.installed${extras:+-${extras//,/-}}
    now=$(fingerprint)
    [ "$(cat "$stamp" 2>/dev/null)" = "$now" ] && return
    if [ -z "$extras" ] && [ "$(cat "$VENV/.installed-dev" 2>/dev/null)" = "$now" ]; then
        return
    fi
    if [ -e "$VENV/.unfinished" ]; then
        rm -rf "$VENV"
    fi
    [ -e "$VENV" ] || create_venv
    "$PYTHON" -m pip --version >/dev/null 2>&1 || die "$VENV has no working pip; ./do clean removes it"
    local constraints=constraints.txt
    [ ! -e "$VENV/$constraints" ] || constraints=$VENV/$constraints
    # A recent setuptools in reach spares the isolated build, which would fetch one: nothing then needs the network.
    local isolation=
    if "$PYTHON" -c 'import setuptools as s; assert int(s.__version__.split(".")[0]) >= 77' 2>/dev/null; then
        isolation=--no-build-isolation
    fi
    local title="installing zeroshard${extras:+ with $extras} (a minute, most of it torch)"
    if compgen -G "$VENV/.installed*" >/dev/null; then
        title="updating the installation: its requirements or kernels have changed"
    fi
    # Those of an earlier build may have another name, and would be found first.
    find src -name '_kernels*.so' -delete
    step "$title" install "$constraints" "$isolation" "$@"
    printf '%s\n' "$now" >"$stamp"
}

# Both, whatever the first says.
lint() {
    local failed=0
    "$VENV/bin/ruff" check . || failed=1
    "$VENV/bin/ruff" format --check . || failed=1
    return $failed
}

types() { "$VENV/bin/mypy"; }

# Each benchmark by its name, and the first line that it says of itself. One that shows no command is part of another.
benchmarks() {
    local script name
    for script in benchmarks/*/*.py; do
        name=${script#benchmarks/}
        if grep -q "^ *python .*$script" "$script"; then
            printf '%-28s %s\n' "${name%.py}" "$(sed -n '1s/^"""\|"""$//gp' "$script")"
        fi
    done
}

# Four sessions share the tests out: whoever comes to a file first runs it. Those that start processes wait for a third of
# their time, so that two cores have work for four.
sessions() { "$PYTHON" -m pytest --share="$VENV/share" --sessions=4 "$@"; }

# A wheel for this platform and a source distribution. A wheel without kernels would need a compiler to be fast.
build() {
    "$PYTHON" -c 'import setuptools as s; assert int(s.__version__.split(".")[0]) >= 77' 2>/dev/null ||
        "$PYTHON" -m pip install --quiet 'setuptools>=77'
    ZEROSHARD_KERNELS_REQUIRED=1 "$PYTHON" - <<'PY' >build.log 2>&1 || { cat build.log >&2; return 1; }
from setuptools import build_meta

build_meta.build_sdist("dist")
build_meta.build_wheel("dist")
PY
    rm -rf build build.log
}

# The ten files that took the longest, summed over the sessions, and what they took of the CPUs.
slowest() {
    echo "The slowest files, in seconds, and in seconds of a CPU:"
    cat "$VENV"/share/*.seconds | awk '{ took[$3] += $1; spent[$3] += $2; all += $2 }
        END { for (name in took) printf "%7.1f %7.1f  %s\n", took[name], spent[name], name
              printf "%7.1f %7.1f  %s\n", 0, all, "all" }' | sort -rn | awk 'NR <= 10 || $3 == "all"'
}

chore=${1:-help}
[ $# -eq 0 ] || shift
case $chore in
    setup)
        setup dev
        ;;
    demo)
        setup
        exec "$VENV/bin/zeroshard" run --ranks 2 examples/gpt.py "$@"
        ;;
    test)
        setup dev
        # All of them, whatever the first says: one look then shows all there is to mend.
        failed=
        lint || failed+=' lint'
        if [ $# -gt 0 ] && [ "$*" != --wide ]; then
            types || failed+=' types'
            "$PYTHON" -m pytest "$@" || failed+=' pytest'
        else
            rm -rf "$VENV/share"
            mkdir "$VENV/share"
            types >"$VENV/types.log" 2>&1 &
            other=$!
            trap 'kill "$other" 2>/dev/null || true' EXIT
            sessions "$@" || failed+=' pytest'
            wait "$other" || failed+=' types'
            cat "$VENV/types.log" "$VENV"/share/session-*.log
            slowest
        fi
        [ -z "$failed" ] || die "failed:$failed"
        ;;
    lint | types)
        setup dev
        "$chore" "$@"
        ;;
    bench)
        if [ $# -eq 0 ]; then
            benchmarks
            exit
        fi
        script=benchmarks/${1%.py}.py
        shift
        [ -e "$script" ] || die "there is no $script; ./do bench lists the benchmarks"
        case $script in
            */steps/*) setup dev peers ;;  # which are timed beside it
            *) setup dev ;;
        esac
        exec "$PYTHON" "$script" "$@"
        ;;
    libraries)
        setup dev libraries
        exec "$PYTHON" -m pytest --wide tests/integrations/test_works_with.py "$@"
        ;;
    docs)
        setup dev docs
        NO_MKDOCS_2_WARNING=1 "$VENV/bin/mkdocs" build --quiet --strict
        say "site/index.html"
        ;;
    build)
        setup dev
        rm -rf dist
        build
        say "$(ls dist/*)"
        ;;
    fuzz)
        setup dev
        exec "$PYTHON" benchmarks/exact/combinations.py --seconds "${1:-600}" \
            --seeds "${2:-0}" "$((${2:-0} + 1000000))" --shrink 120
        ;;
    clean)
        rm -rf "$VENV" build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
        find src -name '_kernels*.so' -delete
        ;;
    help | -h | --help)
        sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        ;;
    *)
        die "there is no chore '$chore'; ./do help lists them"
        ;;
esac
