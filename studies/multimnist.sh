#!/usr/bin/env bash
# The MultiMNIST study of docs/multimnist.md. What is done is skipped: run it again to go on. It wants MNIST in $MOONOPT_DATA.
#   studies/multimnist.sh tune | main | ablations | beyond     (DEVICE=cuda, JOBS=15, RUNS=runs by default)
set -u
DEVICE=${DEVICE:-cuda} JOBS=${JOBS:-15} RUNS=${RUNS:-runs}
export OMP_NUM_THREADS=1
BALANCERS=graddrop,rlw,famo,ls,mgda,pcgrad,cagrad,imtl-g,nash-mtl,si,dwa,uw,gradnorm
WITH_MUON=graddrop+muon,rlw+muon,moon,muon,famo+muon,mgda+muon,pcgrad+muon,cagrad+muon,imtl-g+muon,nash-mtl+muon
WITH_MUON=$WITH_MUON,si+muon,dwa+muon,uw+muon,gradnorm+muon
half=$(( (JOBS + 1) / 2 ))

moonopt() { python -m moonopt "$@" --device "$DEVICE"; }
compare() { moonopt compare multimnist --out "$RUNS" --jobs "$half" "$@"; }
tune() { moonopt tune multimnist --out "$RUNS/tune" --jobs "$half" --seeds 10, "$@"; }

case ${1:?tune, main, ablations or beyond} in
tune)
    tune --methods $WITH_MUON --grid optimizer.lr=5e-3,1e-2,2e-2 --file "$RUNS/tuned-muon.json" &
    tune --methods $BALANCERS --grid optimizer.lr=5e-4,1e-3,2e-3 --file "$RUNS/tuned-adam.json" &
    wait
    # The components of MOON, without one of which its rates may be others.
    tune --methods moon --grid optimizer.lr=5e-3,1e-2,2e-2 --set optimizer.momentum=0 --file "$RUNS/tuned-no-momentum.json" &
    tune --methods moon --grid optimizer.lr=3e-2,1e-1,3e-1 --set optimizer.schedule=none --file "$RUNS/tuned-euclidean.json" &
    ;;
main) # with the rates that were chosen, which MultiMNIST.tuned has
    compare --methods $WITH_MUON &
    compare --methods $BALANCERS &
    ;;
ablations)
    for gamma in 1e-2 5e-2 5e-3 1e-4; do compare --methods moon --set optimizer.gamma=$gamma; done &
    for beta in 1e-5 5e-5 5e-4 1e-3 1e-2 1e-1 1 10; do compare --methods moon --set optimizer.beta=$beta; done &
    ;;
esac
wait
