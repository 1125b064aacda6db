#!/usr/bin/env bash
# The study of docs/synthetic30.md: the paper's regression with thirty tasks, on a CPU. It wants no data.
#   studies/synthetic30.sh STAGE     (by default SPREAD=0, JOBS=2, the cells at once, RUNS=runs/spread-SPREAD)
# SPREAD=1 is the problem with scales that differ, where rates are chosen by the relative loss.
# Stages: tune, nine trials for every method; main, ten seeds at the chosen rates; beta, MOON with other values of it at the rates of
# the plain one, five seeds. SEEDS=3 is another number. What is done is skipped, and what is half trained goes on: run it again.
set -u
. "$(dirname "$0")/common.sh"
SPREAD=${SPREAD:-0} JOBS=${JOBS:-2} RUNS=${RUNS:-runs/spread-${SPREAD:-0}}
METRIC="average loss"
[[ $SPREAD == 0 ]] || METRIC="relative loss"
export OMP_NUM_THREADS=1
ADAM=${ADAM:-famo,ls,uw,si,mgda,nash-mtl}
MUON=${MUON:-moon,muon,famo+muon,mgda+muon}
robust="--set optimizer.beta=auto --set optimizer.loss=log"
end_with_checkpoints

moonopt() {
    room_for 1
    start python -m moonopt "$1" synthetic30 --jobs "$JOBS" --set "data.spread=$SPREAD" "${@:2}"
}
tune() { moonopt tune --out "$RUNS/tune" --seeds 100,101,102 --metric "$METRIC" "$@"; }
compare() { moonopt compare --out "$RUNS" --seeds "${SEEDS:-$1}" "${@:2}"; }

adam=(--grid optimizer.lr=0.0025,0.005,0.01,0.015,0.02,0.03,0.05,0.1,0.2)
muon=(--grid optimizer.lr=0.025,0.05,0.1 --grid optimizer.vector_lr=0.01,0.03,0.1)

case ${1:?tune, main or beta} in
tune)
    tune --methods "$MUON" "${muon[@]}" --file "$RUNS/tuned-muon.json"
    tune --methods moon $robust "${muon[@]}" --file "$RUNS/tuned-moon-log-auto.json"
    tune --methods "$ADAM" "${adam[@]}" --file "$RUNS/tuned-adam.json"
    ;;
main)
    compare 10 --methods "$MUON" --tuned "$RUNS/tuned-muon.json"
    compare 10 --methods moon $robust --tuned "$RUNS/tuned-moon-log-auto.json"
    compare 10 --methods "$ADAM" --tuned "$RUNS/tuned-adam.json"
    ;;
beta)
    for beta in 1e-4 1e-3 3e-3 1e-2 3e-2 auto; do
        for loss in plain log; do
            compare 5 --methods moon --tuned "$RUNS/tuned-muon.json" --set optimizer.beta=$beta --set optimizer.loss=$loss
        done
    done
    ;;
*)
    echo "There is no stage $1." >&2
    exit 2
    ;;
esac
finish
