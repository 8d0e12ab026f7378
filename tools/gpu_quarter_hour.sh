#!/usr/bin/env bash
# What one GPU shows in a quarter of an hour, the most valuable first:
#
#     tools/gpu_quarter_hour.sh [SECONDS] [FOLDER]
#
# A part begins if its expected seconds are left of SECONDS (570), and ends at its limit at the latest. A second call
# runs the parts that have not run, then those that failed. Outputs of the parts are in build/quarter-hour; FOLDER
# (build) gets quarter-hour.json, quarter-hour.md and quarter-hour.tar.xz, the outputs, after every part.
# REHEARSE=1 runs tiny cases on the CPU, where all times are five-fold; its files are named rehearsed-quarter-hour.
# Exit status: 1 if a part failed.
#
# Two ranks share one GPU with NCCL 2.30. For a machine without a package index, put into .loan what it lacks: wheels
# (pydantic and those that pydantic needs), and libnccl.so.2.xz, from the wheel nvidia-nccl-cu13==2.30.7.
set -u
cd "$(dirname "$0")/.."
results=${REHEARSE:+rehearsed-}quarter-hour
deadline=${1:-570} folder=${2:-build} state=build/$results python=.venv/bin/python
[[ -x $python ]] || python=python3
mkdir -p "$state" "$folder"
: >"$state/left-out" # by this call: NAME REASON
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
export CUDA_DEVICE_MAX_CONNECTIONS=32 PYTORCH_ALLOC_CONF=expandable_segments:True

part() { # NAME SECONDS LIMIT COMMAND...
    local name=$1 seconds=$2 limit=$3 left=$((deadline - SECONDS)) begun=$SECONDS status=0
    shift 3
    case $turn in
        new) [[ ! -e $state/$name.status ]] || return ;;
        failed) [[ $failed == *"$state/$name.status"* ]] || return ;;
    esac
    ((seconds *= stretch, left >= seconds)) || { leave_out "$name" "needs $seconds s, $left s are left" && return; }
    ((limit *= stretch, limit < left)) || limit=$left
    rm -f "$state/$name.json" # of an earlier call
    timeout -k 5 $limit "$@" >"$state/$name.out" 2>"$state/$name.err" || status=$?
    echo "$status $((SECONDS - begun)) $seconds $limit $*" >"$state/$name.status"
    echo "$name: status $status after $((SECONDS - begun)) s (expected $seconds)"
    report
}

report() {
    $python tools/quarter_hour.py "$state" "$folder/$results"
    tar -C build -cJf "$folder/$results.tar.xz" "$results"
}

leave_out() { # NAME REASON
    echo "$1: $2"
    echo "$1 $2" >>"$state/left-out"
}

on_gpu() { # KIND NAME...: a part that has nothing to rehearse
    if [[ ! ${REHEARSE:-} ]]; then
        "$@"
    elif [[ $turn == new ]]; then
        leave_out "$2" "only a GPU can show it"
    fi
}

lab() { part "$1" "$2" "$3" $python tools/lab "${@:4}"; }

bench() { part "$1" "$2" "$3" $python -m megascale bench "${@:4}" --json; }

suite() { # NAME SECONDS LIMIT GPUS SELECTION: tests of at most 90 s each
    local words=(--gpus "$4" -k "$5" --json $state/"$1".json -o timeout=$((90 * stretch))) variables=()
    (($4 == 1)) || variables=("${pair[@]}")
    part "$1" "$2" "$3" env "${variables[@]}" $python tools/test_gpu.py ${REHEARSE:+--rehearse} "${words[@]}"
}

if compgen -G '.loan/*.whl' >/dev/null; then
    $python -m pip install -q --no-index --no-deps --no-compile --upgrade --target build/loan .loan/*.whl
    PYTHONPATH+=:$PWD/build/loan
fi
pair=(NCCL_MAX_CTAS=4) stretch=1 cpu=() tiny=() interpreter=() # environment of two ranks; arguments of a rehearsal
if [[ ${REHEARSE:-} ]]; then
    export CUDA_VISIBLE_DEVICES=
    stretch=5 deadline=${1:-2850} cpu=(--device cpu) interpreter=(env TRITON_INTERPRET=1)
    tiny=(model.hidden_size=64 model.num_heads=8 model.num_kv_heads=8 model.seq_length=64 model.vocab_size=512)
    tiny+=(model.ffn_size=128)
elif (($($python -c 'import torch; print(torch.cuda.device_count())') == 1)); then
    pair+=(NCCL_MULTI_RANK_GPU_ENABLE=1)
    if [[ -f .loan/libnccl.so.2.xz ]]; then
        xz -dkc .loan/libnccl.so.2.xz >build/libnccl.so.2
        pair+=(LD_PRELOAD="$PWD/build/libnccl.so.2")
    fi
fi
llama=configs/bench/llama3-8b-slice.toml gpt3=configs/bench/gpt3-175b-slice.toml
fp8=(train.precision=fp8 fp8.monitor=false)
layouts='llama and (sp or zero or ulysses or vpp) and not (overlapped or tiles or memory)'
casts='casts_are_bit_equal or weights_gradients'

failed=$(grep -L '^0 ' $state/*.status 2>/dev/null) # in earlier calls
for turn in new failed; do
    part machine 10 90 env "${pair[@]}" $python -m megascale doctor --json
    part waits 60 100 "${interpreter[@]}" $python tools/lab device-waits "${cpu[@]}"
    lab spin-gemm 25 60 spin-gemm "${cpu[@]}"
    suite waiting 60 120 2 waits_for_the_device
    suite layouts 80 150 2 "$layouts"
    on_gpu suite casts 40 100 1 "$casts"
    for recipe in tensorwise rowwise; do
        bench "fp8-$recipe" 70 120 mfu --config $llama "${fp8[@]}" fp8.recipe=$recipe "${tiny[@]}"
    done
    bench bf16 60 100 mfu --config $llama "${tiny[@]}"
    suite cold 80 160 2 cold_start
    suite killed 20 60 2 killed_rank_ends
    bench 175b-bf16 60 100 mfu --config $gpt3 "${tiny[@]}"
    bench 175b-fp8 60 100 mfu --config $gpt3 "${fp8[@]}" fp8.recipe=delayed "${tiny[@]}"
    words=(--config configs/gpu/gpt3-175b.toml --ranks 1024 --rank 8 --micro 1 2)
    lab rank-of-175b 50 120 fake-rank "${words[@]}" "${cpu[@]}" "${tiny[@]}"
    on_gpu suite serial 60 150 2 one_after_the_other
    suite exchanges 40 90 2 'exchange_keys or pending_receive'
    bench gemm 40 90 gemm ${REHEARSE:+--sizes 64x64x64} --dtypes bf16 fp8 fp8_fast fp8_tensorwise fp8_tensorwise_fast
    suite again 60 180 1 "(fp8 or masked or resumes or marks or host_time) and not ($casts)"
    on_gpu suite stopped 100 150 2 stopped_rank
    bench without-log 60 100 mfu --config $llama observe.record_events=false "${tiny[@]}"
done
report
! grep -qv '^0 ' $state/*.status
