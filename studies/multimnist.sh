#!/usr/bin/env bash
# The MultiMNIST study of docs/multimnist.md. What is done is skipped: run it again to go on. It wants MNIST in $MOONOPT_DATA.
#   studies/multimnist.sh tune | main | tune-components | ablations | beyond     (by default DEVICE=cuda, JOBS=15, RUNS=runs)
set -u
DEVICE=${DEVICE:-cuda} JOBS=${JOBS:-15} RUNS=${RUNS:-runs}
export OMP_NUM_THREADS=1
ALL=graddrop,rlw,famo,ls,mgda,pcgrad,cagrad,imtl-g,nash-mtl,si,dwa,uw,gradnorm
ADAM=${ADAM:-$ALL}
MUON=${MUON:-moon,muon,$(sed "s/ls,//; s/,/+muon,/g; s/$/+muon/" <<< $ALL)}
half=$(( (JOBS + 1) / 2 ))

moonopt() { python -m moonopt "$@" --device "$DEVICE"; }
compare() { moonopt compare multimnist --out "$RUNS" --jobs "$half" "$@"; }
tune() { moonopt tune multimnist --out "$RUNS/tune" --jobs "$half" --seeds 10, "$@"; }

case ${1:?tune, main, tune-components, ablations or beyond} in
tune)
    tune --methods $MUON --grid optimizer.lr=2.5e-3,5e-3,1e-2,2e-2 --file "$RUNS/tuned-muon.json" &
    tune --methods $ADAM --grid optimizer.lr=2.5e-4,5e-4,1e-3,2e-3 --file "$RUNS/tuned-adam.json" &
    ;;
tune-components) # of MOON, without one of which its rates may be others
    tune --methods moon --grid optimizer.lr=2.5e-3,5e-3,1e-2,2e-2 --set optimizer.momentum=0 --file "$RUNS/tuned-no-momentum.json" &
    tune --methods moon --grid optimizer.lr=3e-2,6e-2,1.2e-1,2.4e-1 --set optimizer.schedule=none --file "$RUNS/tuned-euclidean.json" &
    ;;
main)
    compare --methods $MUON --tuned "$RUNS/tuned-muon.json" &
    compare --methods $ADAM --tuned "$RUNS/tuned-adam.json" &
    ;;
ablations)
    moon() { compare --methods moon --tuned "$RUNS/tuned-muon.json" "$@"; }
    for gamma in 1e-2 5e-2 5e-3 1e-4; do moon --set optimizer.gamma=$gamma; done &
    for beta in 1e-5 5e-5 5e-4 1e-3 1e-2 1e-1 1 10; do moon --set optimizer.beta=$beta; done &
    ;;
esac
wait
