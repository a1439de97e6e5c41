# Sourced with `--system-packages` or "": names the Debian packages that tests need and that are missing; with the option
# they are installed, without it the tests that need them are skipped.
needed=() optional=()
has() { command -v "$1" >/dev/null || [ -e "$1" ]; }
has g++ || needed+=(g++)
has "$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" || needed+=(python3-dev)
skipped=""
without() { # PACKAGES TESTS
    optional+=($1)
    skipped+="$(printf '  %-36s %s' "$1" "$2")"$'\n'
}
has /usr/include/libaio.h || without libaio-dev "offload to NVMe"
has mpirun || without openmpi-bin "launches by mpirun"
has ip || without iproute2 "several hosts, which are network namespaces"
has /usr/sbin/sshd || without openssh-server "several hosts"
has pdsh || without pdsh "launches by pdsh"
has slurmd || without "slurmctld slurmd slurm-client munge" "launches by Slurm"
has shellcheck || without shellcheck "checks of documented scripts"
if [ -n "$1" ] && [ $((${#needed[@]} + ${#optional[@]})) -gt 0 ]; then
    echo "installing Debian packages: ${needed[*]} ${optional[*]}"
    apt-get update -qq
    apt-get install -y -qq "${needed[@]}" "${optional[@]}" >/dev/null
elif [ ${#needed[@]} -gt 0 ]; then
    echo "the tests compile C++: install ${needed[*]} (Debian), or give --system-packages as root" >&2
    exit 2
elif [ -n "$skipped" ]; then
    printf 'skipped for lack of Debian packages, which --system-packages installs as root:\n%s' "$skipped"
fi
