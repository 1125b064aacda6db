#!/usr/bin/env bash
# The QM9 study of docs/qm9.md. It wants QM9 in $MOONOPT_DATA (moonopt data fetch qm9).
#   studies/qm9.sh STAGE     (by default DEVICE=cuda, JOBS=3, the cells at once, RUNS=runs, EPOCHS=60, SWEEP=12)
# Stages: speed, which wants the GPU to itself and writes SPEED/qm9-GPU.json (results/speed, h200); tune, three rates for four rows
# with EPOCHS epochs, those of the others being chosen before (results/qm9); budget, three seeds of every method, those that were not
# tuned at the rate of ls; beta, MOON with other values of it, SWEEP epochs; protocol, the full 300 epochs. Plateaus have a patience
# scaled to the epochs. Messages are kept in float16, products are in TensorFloat-32; ENGINE is how task gradients are made, by default
# stored:batched, in one backward pass.
# METHODS=moon,ls restricts tune, budget and protocol; in it moon-log-auto is MOON with loss=log and beta=auto. SEEDS=1 or 0,2 are
# other seeds than the first three, in protocol than the first. MORE has settings, as for a rehearsal with made-up molecules, whose
# runs, rates and times must not come between the real ones; half a minute a run:
#   moonopt data make qm9 --out made; export MOONOPT_DATA=made RUNS=rehearsal SPEED=rehearsal/speed DEVICE=cpu
#   export MORE="--set data.valid_molecules=50 --set data.test_molecules=50 --set train.steps_per_epoch=1 --set train.batch_size=20"
#   export MORE="$MORE --set model.width=16 --set model.edge_width=30"
# What is done in RUNS is skipped, and what is half trained goes on: run it again. After a SIGTERM, as of `timeout 500 studies/qm9.sh
# budget`, it ends as soon as all runs have written their checkpoints.
set -u
. "$(dirname "$0")/common.sh"
DEVICE=${DEVICE:-cuda} JOBS=${JOBS:-3} RUNS=${RUNS:-runs} EPOCHS=${EPOCHS:-60} SWEEP=${SWEEP:-12} MORE=${MORE:-}
ENGINE=${ENGINE:-stored:batched} SPEED=${SPEED:-results/speed} GPU=${GPU:-h200}
export OMP_NUM_THREADS=1
TUNE=moon-log-auto,famo,ls,imtl-g
ALL=moon,moon-log-auto,muon,famo+muon,famo,ls,nash-mtl,si,rlw,dwa,uw,mgda,pcgrad,cagrad,imtl-g
TUNED=${TUNED:-$(dirname "$0")/../results/qm9}

if [[ ! ${SEEDS:-1} =~ ^([1-9][0-9]*|([0-9]+,)+[0-9]*)$ ]]; then
    echo "SEEDS is how many, such as 3, or which, such as 0,2 or 1, found $SEEDS." >&2
    exit 2
fi
end_with_checkpoints
trap tidy EXIT

# A command of moonopt with so many cells, beside others of its kind.
beside() {
    local lanes=$(( JOBS > $1 ? JOBS / $1 : 1 )) few=$(( JOBS < $1 ? JOBS : $1 ))
    room_for "$lanes"
    start python -m moonopt "${@:2}" --set model.half_messages=true --device "$DEVICE" --tf32 --jobs "$few" $MORE
}
tune() { beside 3 tune qm9 --out "$RUNS/tune" --seeds 10, "$@"; }
compare() { beside "$(count "$1")" compare qm9 --out "$RUNS" --seeds "$@"; }

names() { tr , " " <<< "${METHODS:-$1}"; }
count() { [[ $1 == *,* ]] && wc -w <<< "${1//,/ }" || echo "$1"; }
short() { echo --set "train.epochs=$1" --set "train.schedule=plateau:0.7:$(( ($1 + 59) / 60 ))"; }
method() {
    case $1 in
    moon-log-auto) echo --methods moon --set optimizer.beta=auto --set optimizer.loss=log ;;
    nash-mtl | mgda | pcgrad | cagrad | imtl-g) echo --methods "$1" --set "method.engine=$ENGINE" ;;
    *) echo --methods "$1" ;;
    esac
}
grid() {
    case $1 in
    moon* | *muon) echo --grid optimizer.lr=6.3e-4,1.25e-3,2.5e-3 ;;
    imtl-g) echo --grid optimizer.lr=2.5e-4,5e-4,1e-3 ;; # the rate of ls is too large for it
    *) echo --grid optimizer.lr=1e-3,2e-3,4e-3 ;;
    esac
}
tuned() { # the benchmark's own rate where there is no file, and none of ls
    for folder in "$RUNS" "$TUNED"; do
        if [[ -f $folder/tuned-$1.json ]]; then echo --tuned "$folder/tuned-$1.json" && return; fi
    done
    for folder in "$RUNS" "$TUNED"; do
        if [[ $1 != moon* && $1 != *muon && -f $folder/tuned-ls.json ]]; then
            echo --set "optimizer.lr=$(chosen_rate "$folder/tuned-ls.json" ls)" && return
        fi
    done
}

case ${1:?speed, tune, budget, beta or protocol} in
speed) measure qm9 molecules ;;
tune)
    for name in $(names "$TUNE"); do
        tune $(short "$EPOCHS") $(method "$name") $(grid "$name") --file "$RUNS/tuned-$name.json"
    done
    ;;
budget)
    for name in $(names "$ALL"); do compare "${SEEDS:-3}" $(short "$EPOCHS") $(method "$name") $(tuned "$name"); done
    ;;
beta) # all of MOON at the rate that was chosen for the plain one
    for name in muon famo+muon; do compare 1 $(short "$SWEEP") --methods $name $(tuned $name); done
    for beta in 1e-4 3e-4 1e-3 3e-3 1e-2 auto; do
        for loss in plain log; do
            compare 1 $(short "$SWEEP") --methods moon $(tuned moon) --set optimizer.beta=$beta --set optimizer.loss=$loss
        done
    done
    ;;
protocol)
    for name in $(names moon,moon-log-auto,muon,famo+muon,famo); do compare "${SEEDS:-1}" $(method "$name") $(tuned "$name"); done
    ;;
*)
    echo "There is no stage $1." >&2
    exit 2
    ;;
esac
finish
