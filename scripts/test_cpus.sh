#!/usr/bin/env bash
# Run the tests with the instructions of other CPUs than this one, as far as it has them, and print what fails with each.
#
#     bash scripts/test_cpus.sh [PYTEST ARGUMENT...]
#
# Without arguments it is the default suite, in the environment that is active. Each line below names a capability of
# torch's kernels, of oneDNN's, of MKL's and of OpenBLAS's (numpy), and the threads. `blocks` sums products in an order
# that no CPU has (tests/blocks/sitecustomize.py), which finds limits that hold by luck. What no variable chooses remains
# this CPU's: onnxruntime, and DeepSpeed's operators, which are compiled for the CPU they are compiled on.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
export PYTHONPATH="$PWD" DS_ACCELERATOR=cpu
list="$PWD/.cache/test_cpus.txt"
mkdir -p .cache
: > "$list"
has() { [ "$1" = - ] || grep -qw "$1" /proc/cpuinfo; }
# name, flag of /proc/cpuinfo, ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, MKL_ENABLE_INSTRUCTIONS, OPENBLAS_CORETYPE, threads
while read -r name flag aten onednn mkl openblas threads; do
    if ! has "$flag"; then
        echo "$name: skipped, this CPU has no $flag" | tee -a "$list"
        continue
    fi
    variables=(
        ATEN_CPU_CAPABILITY="$aten" ONEDNN_MAX_CPU_ISA="$onednn" MKL_ENABLE_INSTRUCTIONS="$mkl"
        OPENBLAS_CORETYPE="$openblas" OMP_NUM_THREADS="$threads"
    )
    # MKL takes AVX2 on CPUs of AMD whatever it is told; its compatible branch sums in another order.
    [ "$mkl" != SSE4_2 ] || variables+=(MKL_CBWR=COMPATIBLE)
    [ "$name" != blocks ] || variables+=(PYTHONPATH="$PWD:$PWD/tests/blocks")
    echo "$name: ${variables[*]}" | tee -a "$list"
    env "${variables[@]}" python -m pytest -q -rfE --tb=short --show-capture=no --numprocesses=2 --dist=loadfile \
        --no-loadscope-reorder "$@" > ".cache/test_cpus-$name.txt" 2>&1 < /dev/null
    grep -E "^(FAILED|ERROR)|(passed|failed|error).* in " ".cache/test_cpus-$name.txt" | tee -a "$list"
done <<'CPUS'
sse4 - default SSE41 SSE4_2 Nehalem 1
avx2 avx2 avx2 AVX2 AVX2 Haswell 2
avx512 avx512f avx512 AVX512_CORE AVX512 SkylakeX 2
bf16 avx512_bf16 avx512 AVX512_CORE_BF16 AVX512 Cooperlake 1
amx amx_tile avx512 AVX512_CORE_AMX AVX512 SapphireRapids 1
blocks avx2 avx2 AVX2 AVX2 Haswell 1
CPUS
echo "written: $list"
! grep -qE "^(FAILED|ERROR)" "$list"
