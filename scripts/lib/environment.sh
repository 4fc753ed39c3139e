# shellcheck shell=bash
# The pinned CPU environment in .venv: how it is made, kept and checked. Sourced by scripts/quickstart
# and scripts/test, which call prepare_environment. Changes nothing outside the repository's folder
# but pip's own cache.
#
# Settings, all optional:
#   PYTHON           the Python 3.11 to build the environment with
#   TORCH_CPU_INDEX  where to look for torch's CPU build when pip's configured sources lack it
# pip's configuration (pip.conf, PIP_*) holds as everywhere.

repo_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
lib_dir=$repo_root/scripts/lib
lock_file=$repo_root/requirements/cpu.lock
venv_dir=$repo_root/.venv
venv_python=$venv_dir/bin/python
cache_dir=$repo_root/.cache
scratch_dir=$cache_dir/tmp
torch_cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

# What the scripts made may be replaced by them; a finished part leaves the hash of its inputs.
# Inside .venv, so that all of it goes when .venv goes.
venv_marker=$venv_dir/.made-by-scripts
packages_stamp=$venv_dir/.packages-complete
project_stamp=$venv_dir/.project-complete

needed_mb=5000
log_path=
child_pid=
step_number=0
step_total=0
step_log_start=0

say() { printf '%s\n' "$*"; }

fail() {
    printf '\nerror: %s\n' "$1" >&2
    shift
    local line
    for line in "$@"; do
        if [[ -n $line ]]; then printf '  %s\n' "$line" >&2; fi
    done
    exit 1
}

hash_of() { # the files' contents, their names and where the environment stands
    { printf '%s\n' "$venv_dir"; sha256sum -- "$@"; } | sha256sum | cut -d' ' -f1
}

packages_hash() {
    hash_of "$lock_file" "$lib_dir/environment.sh" "$lib_dir/check_pins.py" "$lib_dir/torchvision_cpu.py"
}

# Code is read in place by the editable install; only these two files decide what is written to .venv.
project_hash() { hash_of "$repo_root/pyproject.toml" "$repo_root/setup.py"; }

stamped() { # FILE HASH
    [[ -x $venv_python && -f $1 && $(<"$1") == "$2" ]]
}

write_stamp() { # FILE HASH
    printf '%s\n' "$2" >"$1.new"
    mv -f -- "$1.new" "$1"
}

# --- progress and failures ----------------------------------------------------------------------

start_log() {
    mkdir -p -- "$cache_dir/logs"
    # Names sort by time; the ten newest stay.
    local old
    while IFS= read -r old; do rm -f -- "$old"; done < <(
        find "$cache_dir/logs" -name 'environment-*.log' | sort -r | tail -n +10
    )
    log_path=$cache_dir/logs/environment-$(date +%Y%m%d-%H%M%S)-$$.log
    : >"$log_path"
}

step() { # MESSAGE
    step_number=$((step_number + 1))
    step_message="[$step_number/$step_total] $1"
    step_began=$SECONDS
    step_next_note=30
    step_log_start=$(($(stat -c %s -- "$log_path") + 1))
    if [[ -t 1 ]]; then printf '%s' "$step_message"; else say "$step_message"; fi
}

step_tick() {
    local elapsed=$((SECONDS - step_began))
    if [[ -t 1 ]]; then
        printf '\r%s  %d s' "$step_message" "$elapsed"
    elif ((elapsed >= step_next_note)); then
        step_next_note=$((step_next_note + 30))
        say "      still at it, $elapsed s"
    fi
}

step_done() {
    local elapsed=$((SECONDS - step_began))
    if [[ -t 1 ]]; then printf '\r%s  done, %d s\n' "$step_message" "$elapsed"; else say "      done, $elapsed s"; fi
}

# Runs a command with its output in the log. In the background, so that the elapsed time can be
# shown and an interrupt is acted on at once rather than when the command ends.
logged() {
    local status=0
    { printf '$'; printf ' %q' "$@"; printf '\n'; } >>"$log_path"
    "$@" >>"$log_path" 2>&1 </dev/null &
    child_pid=$!
    while kill -0 "$child_pid" 2>/dev/null; do
        step_tick
        sleep 0.2
    done
    wait "$child_pid" || status=$?
    child_pid=
    return "$status"
}

interrupted() { # SIGNAL-NUMBER
    trap - INT TERM HUP
    if [[ -n $child_pid ]]; then
        # Background commands ignore SIGINT, so that Ctrl-C reaches this script alone.
        kill -TERM "$child_pid" 2>/dev/null || true
        wait "$child_pid" 2>/dev/null || true
    fi
    rm -rf -- "$scratch_dir"
    printf '\ninterrupted; run the same command again to go on from here\n' >&2
    exit "$((128 + $1))"
}

step_log() { tail -c "+$step_log_start" -- "$log_path"; }

# Not a pipe: grep -q leaves early, and pipefail would report the writer's SIGPIPE as "not found".
log_shows() { grep -qiE -- "$1" <<<"$(step_log)"; }

# What the current step's log says went wrong, in words, with the remedy.
fail_step() { # WHAT
    local missing torch_pin
    local -a advice=()
    if log_shows 'no space left on device'; then
        advice+=("The disk is full. Free some space (about $((needed_mb / 1000)) GB in all) and run this again.")
    elif log_shows 'no matching distribution found'; then
        missing=$(step_log | sed -n 's/.*No matching distribution found for \([^ ;]*\).*/\1/p' | sort -u | tr '\n' ' ')
        advice+=("Not found: ${missing% }")
        torch_pin=$(pin_of torch)
        if [[ " $missing" == *" $torch_pin "* || " $missing" == *" $(pin_of torchvision) "* ]]; then
            advice+=(
                "It was looked for in pip's configured sources, then at $torch_cpu_index as well."
                "Remedy: give this machine access to that index; or name a mirror of it in TORCH_CPU_INDEX;"
                "or download the wheel elsewhere and run this again with PIP_FIND_LINKS=FOLDER-WITH-THE-WHEEL."
            )
        else
            advice+=(
                "Remedy: point pip at an index that holds it (PyPI does):"
                "pip config list shows the sources now in use; PIP_INDEX_URL or pip config set changes them."
            )
        fi
        if log_shows 'newconnectionerror|name resolution|timed out|proxyerror|sslerror|max retries'; then
            advice+=("The log shows network errors: an index may be out of reach (proxy, certificate, no network).")
        fi
    elif log_shows 'newconnectionerror|name resolution|timed out|proxyerror|sslerror|max retries|connection'; then
        advice+=("The network failed on the way. Running this again goes on from here.")
    fi
    printf '\n\nLast lines of the log:\n' >&2
    # Without pip's remarks on sources that lack one package or another: they are no failure.
    { step_log | grep -v '^WARNING: Location .* is ignored' || true; } | tail -n 15 | cut -c1-200 | sed 's/^/  | /' >&2
    fail "$1" "${advice[@]}" "Whole log: $log_path"
}

# --- what the machine must have -----------------------------------------------------------------

is_python_311() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) or sys.implementation.name != "cpython")' \
        >/dev/null 2>&1
}

find_python() { # sets $python
    local candidate seen=
    local -a candidates=(python3.11 python3 python)
    # Alone if it is set: a wrong choice must not be replaced silently.
    if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        command -v -- "$candidate" >/dev/null 2>&1 || continue
        if is_python_311 "$candidate"; then
            python=$(command -v -- "$candidate")
            return
        fi
        seen+="$candidate is $("$candidate" --version 2>&1 | head -n 1 || true); "
    done
    fail "Python 3.11 is needed and was not found." \
        "${seen:+Found: ${seen%; }.}" \
        "The pinned packages (requirements/cpu.lock) are built for 3.11; 3.12 and later do not fit them." \
        "Remedy, one of:" \
        "  a distribution that has it:  apt-get install python3.11 python3.11-venv python3.11-dev" \
        "  pyenv:                       pyenv install 3.11 && pyenv shell 3.11" \
        "  uv:                          uv python install 3.11" \
        "Or name an interpreter:        PYTHON=/path/to/python3.11 $0"
}

check_platform() {
    local system
    system="$(uname -s) $(uname -m)"
    [[ $system == "Linux x86_64" ]] || fail "The pinned CPU environment is for Linux x86_64; this is $system." \
        "Remedy: run it on such a machine, or in a container or virtual machine of that kind."
    command -v flock >/dev/null || fail "The command flock was not found." \
        "Remedy: install util-linux (apt-get install util-linux)."
}

check_disk() {
    local free_mb have_mb=0 want_mb
    free_mb=$(df -Pm -- "$repo_root" | awk 'NR == 2 { print $4 }')
    if [[ -d $venv_dir ]]; then have_mb=$(du -sm -- "$venv_dir" | cut -f1); fi
    # Part of it may be there already; replacing a package in place still takes some room.
    want_mb=$((needed_mb - have_mb))
    if ((want_mb < 1000)); then want_mb=1000; fi
    if ((free_mb < want_mb)); then
        fail "Not enough disk space: $free_mb MB free at $repo_root, about $want_mb MB needed." \
            "Remedy: free some space there, or move the repository to a larger disk."
    fi
}

check_ownership() { # an empty folder may be what is left of a run cut short
    if [[ -e $venv_dir && ! -e $venv_marker ]] && ! rmdir -- "$venv_dir" 2>/dev/null; then
        fail "$venv_dir exists and was not made by these scripts." "Remedy: move it away or remove it, then run this again."
    fi
}

# Neither is needed to install, and without them the demo runs its graphs uncompiled: this only tells.
tell_missing_compiler() {
    local -a missing=()
    command -v -- "${CXX:-g++}" >/dev/null 2>&1 || missing+=("a C++ compiler (${CXX:-g++})")
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
        missing+=("Python's headers (Python.h)")
    ((${#missing[@]})) || return 0
    local joined=${missing[0]}
    if ((${#missing[@]} > 1)); then joined+=" and ${missing[1]}"; fi
    say "note: not found: $joined. Compiled graphs (lane 'inductor') need them; without"
    say "      them the demo runs uncompiled. Remedy: apt-get install g++ python3.11-dev"
}

# --- the environment ----------------------------------------------------------------------------

# -I keeps PYTHONPATH and the user's site-packages out: pip would take what lies there for installed.
# TMPDIR because /tmp is often too small a RAM disk for torch; PIP_USER does not go with a venv.
# An array, not a function: in the background a function would run in a shell of its own, and an
# interrupt would end that shell instead of pip.
in_venv=(env "TMPDIR=$scratch_dir" PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv_python" -I)

# No resolving and no building: exactly what is asked for, from wheels. Modules compile when first
# imported; compiling all of them here costs more time than the few that are used.
pip_install() { logged "${in_venv[@]}" -m pip install --no-deps --only-binary=:all: --no-compile "$@"; }

pin_of() { sed -n "s/^\($1==[^ ;#]*\).*/\1/p" "$lock_file"; }

venv_is_usable() {
    [[ -x $venv_python ]] && "${in_venv[@]}" -c 'import sys
import pip
sys.exit(sys.prefix != sys.argv[1] or sys.version_info[:2] != (3, 11))' "$venv_dir" >/dev/null 2>&1
}

make_venv() {
    if venv_is_usable; then
        logged "${in_venv[@]}" "$lib_dir/check_pins.py" --repair "$lock_file" || fail_step "The environment in .venv cannot be read."
        return
    fi
    # Moved first: a removal cut short could leave a folder without its marker.
    if [[ -e $venv_dir ]]; then mv -- "$venv_dir" "$scratch_dir/old-venv"; fi
    rm -rf -- "$scratch_dir/old-venv"
    mkdir -- "$venv_dir"
    : >"$venv_marker"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        logged "$python" -m venv "$venv_dir" || fail_step "python -m venv failed."
        return
    fi
    # Debian ships venv's installer of pip in a package of its own; pip itself can stand in for it.
    logged "$python" -m venv --without-pip "$venv_dir" || fail_step "python -m venv failed."
    logged "$python" -m pip --python "$venv_python" install --ignore-installed pip ||
        fail_step "This Python can make no environment with pip in it (remedy: apt-get install python3.11-venv)."
}

# torch and torchvision first and together: the extra index, where it is needed, then serves these
# two alone, and gives torchvision's CPU build along with torch's.
install_torch() {
    local -a pins
    pins=("$(pin_of torch)" "$(pin_of torchvision)")
    pip_install "${pins[@]}" && return
    log_shows 'no matching distribution found' || fail_step "PyTorch could not be installed."
    printf '\n# not in the configured sources; once more with %s\n' "$torch_cpu_index" >>"$log_path"
    pip_install --extra-index-url "$torch_cpu_index" "${pins[@]}" || fail_step "PyTorch could not be installed."
}

install_rest() {
    pip_install -r "$lock_file" || fail_step "The pinned packages could not be installed."
    # CUDA builds on PyPI that fail on import here, and that vLLM imports when they are installed.
    logged "${in_venv[@]}" -m pip uninstall --yes torchaudio torchcodec || fail_step "torchaudio and torchcodec could not be removed."
}

repair_torchvision() {
    local site
    site=$("${in_venv[@]}" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    rm -f -- "$site/torchvision_cpu.py" "$site/torchvision_cpu.pth"
    logged "${in_venv[@]}" -c 'import torchvision' && return
    log_shows 'operator torchvision::nms does not exist' || fail_step "torchvision cannot be imported."
    cp -- "$lib_dir/torchvision_cpu.py" "$site/"
    printf 'import torchvision_cpu\n' >"$site/torchvision_cpu.pth"
    logged "${in_venv[@]}" -c 'import torchvision' || fail_step "torchvision cannot be imported."
}

install_packages() {
    step "Python environment in .venv"
    make_venv
    step_done
    step "PyTorch, CPU build (about 1 GB)"
    install_torch
    step_done
    step "$(grep -c '^[^#]' "$lock_file") pinned packages (about 3 GB)"
    install_rest
    step_done
    step "Checking what was installed"
    logged "${in_venv[@]}" "$lib_dir/check_pins.py" "$lock_file" || fail_step "The environment does not match requirements/cpu.lock."
    repair_torchvision
    step_done
}

install_project() {
    step "This project, editable"
    logged "${in_venv[@]}" -m pip install --no-deps --no-build-isolation --editable "$repo_root" ||
        fail_step "The project itself could not be installed."
    step_done
}

# Leaves .venv complete, or ends the script with the reason.
prepare_environment() {
    [[ -f $lock_file ]] || fail "requirements/cpu.lock is missing." "Remedy: restore it (git checkout requirements/cpu.lock)."
    local packages project lock_fd
    packages=$(packages_hash)
    project=$(project_hash)
    if stamped "$packages_stamp" "$packages" && stamped "$project_stamp" "$project"; then return; fi

    check_platform
    mkdir -p -- "$cache_dir"
    # Commands started below inherit the lock. Should this script be killed outright, it stays held
    # until the pip that was left behind has ended, so nobody writes beside it.
    exec {lock_fd}>>"$cache_dir/environment.lock"
    if ! flock --nonblock "$lock_fd"; then
        say "Another run is preparing the environment; waiting for it ..."
        flock "$lock_fd"
    fi

    local began=$SECONDS todo_packages=0 todo_project=0
    stamped "$packages_stamp" "$packages" || todo_packages=1
    if ((todo_packages)) || ! stamped "$project_stamp" "$project"; then todo_project=1; fi
    step_total=$((4 * todo_packages + todo_project))
    if ((step_total)); then
        trap 'interrupted 2' INT
        trap 'interrupted 15' TERM
        trap 'interrupted 1' HUP
        if ((todo_packages)); then
            find_python
            check_ownership
            check_disk
            tell_missing_compiler
            if [[ -d $venv_dir ]]; then say "Bringing .venv up to date (an earlier run was interrupted, or its inputs changed)."; fi
        fi
        start_log
        rm -rf -- "$scratch_dir"
        mkdir -p -- "$scratch_dir"
        if ((todo_packages)); then
            rm -f -- "$packages_stamp" "$project_stamp"
            install_packages
            write_stamp "$packages_stamp" "$packages"
        fi
        rm -f -- "$project_stamp"
        install_project
        write_stamp "$project_stamp" "$project"
        rm -rf -- "$scratch_dir"
        trap - INT TERM HUP
        say "Environment ready after $((SECONDS - began)) s."
    fi
    exec {lock_fd}>&-
}

# Models here are built or read on this machine: nothing is to be fetched from a hub or reported.
set_offline() {
    export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
    export VLLM_NO_USAGE_STATS=1 VLLM_DO_NOT_TRACK=1 DO_NOT_TRACK=1
}
