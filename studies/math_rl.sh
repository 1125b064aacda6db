#!/usr/bin/env bash
# The math-rl study of docs/math-rl.md: every method from the same weights of SmolLM2-135M-Instruct, 100 updates on MATH-500.
#   studies/math_rl.sh STAGE     (by default DEVICE=cuda, DATA=$MOONOPT_DATA, JOBS=7, the runs at once, RUNS=runs, PIECES=runs/pieces)
# Stages at home: convert, of the GGUF file that `moonopt data fetch smollm2` gets, into DATA/MODEL, a folder of transformers in
# bfloat16; pack, of that folder and SET (math500 or gsm8k) into files of 42 MiB in PIECES, which can be carried one by one.
# Stages on a machine with a GPU, which needs neither gguf nor math-verify: unpack, of PIECES into DATA; start, the model as it is (one
# update at a rate of zero); main, all METHODS; rates, the same with other learning rates. What is done is skipped, and what is half
# trained goes on: run it again. After a SIGTERM, as of `timeout 560 studies/math_rl.sh main`, it ends as soon as all runs have written
# their checkpoints, of 1.6 GB each.
set -eu
. "$(dirname "$0")/common.sh"
DEVICE=${DEVICE:-cuda} DATA=${DATA:-${MOONOPT_DATA:?a folder for data}} JOBS=${JOBS:-7} RUNS=${RUNS:-runs} MODEL=${MODEL:-smollm2-bf16}
PIECES=${PIECES:-runs/pieces} METHODS=${METHODS:-moon,muon,ls,famo,mgda,nash-mtl,gradnorm} SEEDS=${SEEDS:-1} SET=${SET:-math500}
export OMP_NUM_THREADS=1 TRANSFORMERS_OFFLINE=1

end_with_checkpoints

compare() {
    python -m moonopt compare math-rl --out "$RUNS" --data "$DATA" --device "$DEVICE" --amp --tf32 --jobs "$JOBS" --seeds "$SEEDS" \
        --checkpoint-seconds 600 --set "model.folder=$MODEL" --set "data.set=$SET" "$@" &
    wait $!
}

case ${1:?convert, pack, unpack, start, main or rates} in
convert)
    python -c 'import sys; from pathlib import Path; from moonopt.bench.text.models import convert; convert(*map(Path, sys.argv[1:]))' \
        "$DATA/smollm2" "$DATA/$MODEL"
    ;;
pack)
    mkdir -p "$PIECES"
    tar -C "$DATA" -ch "$MODEL" "$SET" | xz -T0 -4 | split -b 42M - "$PIECES/part."
    ls -l "$PIECES"
    ;;
unpack)
    mkdir -p "$DATA"
    cat "$PIECES"/part.* | python -c 'import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall(sys.argv[1])' "$DATA"
    ;;
start) compare --methods ls --set optimizer.lr=0 --set train.epochs=1 --set train.steps_per_epoch=1 ;;
main) compare --methods "$METHODS" ;;
rates)
    compare --methods moon,muon --set optimizer.lr=1.5e-4
    compare --methods "${METHODS//moon,muon,/}" --set optimizer.lr=3e-5
    ;;
*)
    echo "There is no stage $1." >&2
    exit 2
    ;;
esac
