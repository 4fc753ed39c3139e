# shellcheck shell=bash
# Environments beside .venv, each in .cache/envs. Sourced after environment.sh by the scripts NAME_env,
# which call prepare_environment, prepare_side_environment NAME and then run_in_side_environment.

# Leaves the environment complete, or ends the script with the reason. Sets $side_dir and $side_python.
# With `main` it sees everything in .venv as well, and a pin of its own lock comes before the same
# package there.
prepare_side_environment() { # NAME [main]
    local name=$1 sees_main=${2:-} lock=$repo_root/requirements/$1.lock stamp inputs lock_fd
    side_dir=$cache_dir/envs/$name
    side_python=$side_dir/bin/python
    stamp=$side_dir/.complete
    [[ -f $lock ]] || fail "requirements/$name.lock is missing." "Remedy: restore it (git checkout requirements/$name.lock)."
    local -a input_files=("$repo_root/requirements/$name"*.lock "$repo_root/scripts/${name}_env")
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
    logged "$venv_python" -I -m venv --without-pip "$side_dir" || fail_step "python -m venv failed."
    install_side_packages "$lock"
    if [[ -n $sees_main ]]; then show_main_environment; fi
    step_done
    step "Checking what was installed"
    # Not -I: the script may import its neighbour.
    logged env -u PYTHONPATH PYTHONNOUSERSITE=1 "$side_python" "$lib_dir/$check" "$lock" ||
        fail_step "The environment in .cache/envs/$name does not fit requirements/$name.lock."
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
