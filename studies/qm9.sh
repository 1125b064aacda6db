#!/usr/bin/env bash
# The QM9 study. What is done is skipped: run it again to go on. It wants QM9 in $MOONOPT_DATA (moonopt data fetch qm9).
#   studies/qm9.sh speed | tune | budget | beta | protocol     (by default DEVICE=cuda, JOBS=4, RUNS=runs, EPOCHS=60)
# "budget" is three seeds of every method with EPOCHS epochs and a plateau whose patience is scaled to them; "protocol" is the
# full protocol of 300 epochs for four methods.
set -u
DEVICE=${DEVICE:-cuda} JOBS=${JOBS:-4} RUNS=${RUNS:-runs} EPOCHS=${EPOCHS:-60}
export OMP_NUM_THREADS=1
FIRST=moon,muon,famo+muon,famo,ls,nash-mtl
REST=si,rlw,dwa,uw,mgda,pcgrad,cagrad,imtl-g,gradnorm,graddrop

moonopt() { python -m moonopt "$@" --device "$DEVICE" --tf32 --jobs "$JOBS"; }
short() { echo --set "train.epochs=$1" --set "train.schedule=plateau:0.7:$(( ($1 + 59) / 60 ))"; }

case ${1:?speed, tune, budget, beta or protocol} in
speed) python -m moonopt.speed.molecules --device "$DEVICE" --json ;;
tune)
    moonopt tune qm9 --out "$RUNS/tune" --seeds 10, $(short 12) --methods moon,muon,famo+muon \
        --grid optimizer.lr=5e-3,1e-2,2e-2 --file "$RUNS/tuned-muon.json"
    ;;
budget) moonopt compare qm9 --out "$RUNS" --methods ${METHODS:-$FIRST,$REST} --seeds ${SEEDS:-3} $(short "$EPOCHS") ;;
beta)
    for beta in 1e-4 3e-4 1e-3 3e-3 1e-2 auto; do
        for loss in plain log; do
            moonopt compare qm9 --out "$RUNS" --methods moon --seeds 1 $(short 12) --set optimizer.beta=$beta --set optimizer.loss=$loss
        done
    done
    ;;
protocol) moonopt compare qm9 --out "$RUNS" --methods moon,muon,famo+muon,famo --seeds 1 ;;
esac
