# shellcheck shell=bash
# Environments beside .venv, each in .cache/envs. Sourced after environment.sh by other_pythons and the
# scripts NAME_env, which call prepare_environment, prepare_side_environment NAME and then
# run_in_side_environment.

# For a script to set before prepare_side_environment, where its environment differs from the others:
side_interpreter=$venv_python # what it is made with
side_lock=                    # the name in requirements/, if it is not that of the environment
side_inputs=()                # the files that its contents depend on beside the locks, if not scripts/NAME_env

# Leaves the environment complete, or ends the script with the reason. Sets $side_dir and $side_python.
# With `main` it sees everything in .venv as well, and a pin of its own lock comes before the same
# package there.
prepare_side_environment() { # NAME [main]
    local name=$1 sees_main=${2:-} lock_name=${side_lock:-$1} lock stamp inputs lock_fd
    lock=$repo_root/requirements/$lock_name.lock
    side_dir=$cache_dir/envs/$name
    side_python=$side_dir/bin/python
    stamp=$side_dir/.complete
    [[ -f $lock ]] || fail "requirements/$lock_name.lock is missing." \
        "Remedy: restore it (git checkout requirements/$lock_name.lock)."
    local -a input_files=("$repo_root/requirements/$lock_name"*.lock)
    if ((${#side_inputs[@]} == 0)); then side_inputs=("$repo_root/scripts/${name}_env"); fi
    input_files+=("${side_inputs[@]}")
    input_files+=("$lib_dir/side_environment.sh" "$lib_dir/check_requirements.py" "$lib_dir/check_pins.py")
    if [[ -n $sees_main ]]; then input_files+=("$packages_stamp"); fi
    inputs=$(hash_of "${input_files[@]}")
    if side_is_complete; then return; fi

    # The same lock as .venv's: pip and the folder for temporary files are shared.
    exec {lock_fd}>>"$cache_dir/environment.lock"
    if ! flock --nonblock "$lock_fd"; then
        say "Another run is preparing an environment; waiting for it ..."
        flock "$lock_fd"
    fi
    if ! side_is_complete; then make_side_environment; fi
    exec {lock_fd}>&-
}

# The functions down to show_main_environment see the variables of prepare_side_environment.

side_is_complete() { [[ -x $side_python && -f $stamp && $(<"$stamp") == "$inputs" ]]; }

# Always from nothing: that takes less time than finding out what is left of an earlier one.
make_side_environment() {
    local began=$SECONDS check=check_pins.py
    if [[ -n $sees_main ]]; then check=check_requirements.py; fi # and not only the pins: what they ask of .venv, too
    trap 'interrupted 2' INT
    trap 'interrupted 15' TERM
    trap 'interrupted 1' HUP
    start_log
    rm -rf -- "$scratch_dir" "$side_dir"
    mkdir -p -- "$scratch_dir" "$cache_dir/envs"
    step_number=0
    step_total=2
    step "Environment in .cache/envs/$name ($(grep -c '^[^#]' "$lock") pinned packages)"
    logged "$side_interpreter" -I -m venv --without-pip "$side_dir" || fail_step "python -m venv failed."
    install_side_packages "$lock"
    if [[ -n $sees_main ]]; then show_main_environment; fi
    step_done
    step "Checking what was installed"
    # Not -I: the script may import its neighbour.
    logged env -u PYTHONPATH PYTHONNOUSERSITE=1 "$side_python" "$lib_dir/$check" "$lock" ||
        fail_step "The environment in .cache/envs/$name does not fit requirements/$lock_name.lock."
    step_done
    write_stamp "$stamp" "$inputs"
    rm -rf -- "$scratch_dir"
    trap - INT TERM HUP
    say "Environment $name ready after $((SECONDS - began)) s."
}

side_pip_install() {
    logged "${in_venv[@]}" -m pip --python "$side_python" install --no-deps --only-binary=:all: --no-compile "$@"
}

# A script may define its own in the place of this one.
install_side_packages() { # LOCK-FILE
    side_pip_install -r "$1" || fail_step "The packages of ${1#"$repo_root"/} could not be installed."
}

need_disk() ( # MB
    needed_mb=$1
    venv_dir=$side_dir
    check_disk
)

# The CPU build where one is found, and else PyPI's, which loads CUDA's libraries on import.
install_side_torch() { # PIN MB CUDA-LOCK-FILE MB
    need_disk "$2"
    side_pip_install "$1+cpu" && return
    side_pip_install --retries 1 --timeout 15 --extra-index-url "$torch_cpu_index" "$1+cpu" && return
    printf '\n# no CPU build to be found; PyPI'"'"'s, with the libraries that it loads\n' >>"$log_path"
    need_disk "$4"
    side_pip_install "$1" -r "$3" || fail_step "The packages of ${3#"$repo_root"/} could not be installed."
}

show_main_environment() {
    local main side
    main=$("${in_venv[@]}" -c 'import sysconfig; print(repr(sysconfig.get_paths()["purelib"]))')
    side=$("$side_python" -I -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    # addsitedir and not the folder alone: the .pth files in it count too, this project's among them.
    printf 'import site; site.addsitedir(%s)\n' "$main" >"$side/main_environment.pth"
}

# pytest by name means that of this environment; its own script would start the interpreter of .venv.
run_in_side_environment() { # COMMAND [ARGUMENT...]
    cd -- "$repo_root"
    export PATH="$side_dir/bin:$PATH" VIRTUAL_ENV=$side_dir
    if [[ $1 == pytest ]]; then set -- python -m "$@"; fi
    exec "$@"
}
