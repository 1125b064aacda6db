#!/usr/bin/env bash
# The MultiMNIST study of docs/multimnist.md. What is done is skipped: run it again to go on. It wants MNIST in $MOONOPT_DATA.
#   studies/multimnist.sh STAGE     (by default DEVICE=cuda, JOBS=15, the cells at once, and RUNS=runs)
# Stages: tune, main, tune-own, own, tune-components, components, ablations, beyond, exact, efficiency; the last wants the GPU to
# itself.
set -u
. "$(dirname "$0")/common.sh"
DEVICE=${DEVICE:-cuda} JOBS=${JOBS:-15} RUNS=${RUNS:-runs}
export OMP_NUM_THREADS=1
ALL=graddrop,rlw,famo,ls,mgda,pcgrad,cagrad,imtl-g,nash-mtl,si,dwa,uw,gradnorm
ADAM=${ADAM:-$ALL}
MUON=${MUON:-moon,muon,$(sed "s/ls,//; s/,/+muon,/g; s/$/+muon/" <<< $ALL)}
half=$(( (JOBS + 1) / 2 ))
few=$(( JOBS < 3 ? JOBS : 3 )) lanes=$(( JOBS < 3 ? 1 : JOBS / 3 ))

moonopt() { python -m moonopt "$@" --device "$DEVICE"; }
tune() { moonopt tune multimnist --out "$RUNS/tune" --jobs "$half" --seeds 10, "$@"; }
compare() { moonopt compare multimnist --out "$RUNS" "$@"; }

# A comparison of one method, its three seeds at once, beside others of its kind.
lane() {
    room_for "$lanes"
    start compare --jobs "$few" --methods "$@"
}
with_muon() { lane "$@" --tuned "$RUNS/tuned-muon.json"; }

case ${1:?tune, main, tune-own, own, tune-components, components, ablations, beyond, exact or efficiency} in
tune)
    start tune --methods $MUON --grid optimizer.lr=2.5e-3,5e-3,1e-2,2e-2 --file "$RUNS/tuned-muon.json"
    start tune --methods $ADAM --grid optimizer.lr=2.5e-4,5e-4,1e-3,2e-3 --file "$RUNS/tuned-adam.json"
    ;;
main)
    start compare --jobs "$half" --methods $MUON --tuned "$RUNS/tuned-muon.json"
    start compare --jobs "$half" --methods $ADAM --tuned "$RUNS/tuned-adam.json"
    ;;
tune-own) # at the rates that tune has found, the methods' own parameters; two more rates of those that have none
    rates=()
    for name in ls si rlw pcgrad imtl-g graddrop; do rates+=(--grid $name/optimizer.lr=7e-4,1e-3,1.4e-3); done
    start tune --methods moon,muon,$ALL --file "$RUNS/tuned-own.json" --grid moon/optimizer.beta=1e-4,1e-3,1e-2 \
        --grid muon/optimizer.lr=3.5e-3,5e-3,7e-3 "${rates[@]}" \
        --grid famo/balancer.gamma=1e-4,1e-3,1e-2 --grid mgda/balancer.normalisation=none,l2,loss+ \
        --grid cagrad/balancer.c=0.2,0.4,0.8 --grid nash-mtl/balancer.max_norm=0.5,1,2 --grid uw/balancer.lr=2.5e-3,2.5e-2,2.5e-1 \
        --grid dwa/balancer.temperature=1,2,4 --grid gradnorm/balancer.alpha=0.5,1.5,3
    with=()
    for name in famo:5e-3:gamma=1e-4,1e-3,1e-2 mgda:1e-2:normalisation=none,l2,loss+ cagrad:2e-2:c=0.2,0.4,0.8 \
        nash-mtl:5e-3:max_norm=0.5,1,2 uw:5e-3:lr=2.5e-3,2.5e-2,2.5e-1 dwa:5e-3:temperature=1,2,4 gradnorm:5e-3:alpha=0.5,1.5,3; do
        IFS=: read -r method rate own <<< "$name"
        with+=(--grid "$method+muon/optimizer.lr=$rate" --grid "$method+muon/balancer.$own")
    done
    for name in pcgrad si graddrop; do with+=(--grid $name+muon/optimizer.lr=3.5e-3,5e-3,7e-3); done
    with+=(--grid rlw+muon/optimizer.lr=1.75e-3,2.5e-3,3.5e-3 --grid imtl-g+muon/optimizer.lr=1.4e-2,2e-2,2.8e-2)
    start tune --methods "${MUON#moon,muon,}" --file "$RUNS/tuned-own-muon.json" "${with[@]}"
    ;;
own)
    start compare --jobs "$half" --methods moon,muon,$ALL --tuned "$RUNS/tuned-own.json"
    start compare --jobs "$half" --methods "${MUON#moon,muon,}" --tuned "$RUNS/tuned-own-muon.json"
    ;;
tune-components) # of MOON, without one of which its rates may be others
    start tune --methods moon --grid optimizer.lr=1e-2,2e-2,4e-2,8e-2 --set optimizer.momentum=0 --file "$RUNS/tuned-no-momentum.json"
    start tune --methods moon --grid optimizer.lr=7.5e-3,1.5e-2,3e-2,6e-2 --set optimizer.schedule=none --file "$RUNS/tuned-euclidean.json"
    ;;
components)
    lane moon --set optimizer.momentum=0 --tuned "$RUNS/tuned-no-momentum.json"
    lane moon --set optimizer.schedule=none --tuned "$RUNS/tuned-euclidean.json"
    ;;
ablations)
    for gamma in 1e-2 5e-2 5e-3 1e-4; do with_muon moon --set optimizer.gamma=$gamma; done
    for beta in 1e-5 5e-5 5e-4 1e-3 1e-2 1e-1 1 10; do with_muon moon --set optimizer.beta=$beta; done
    ;;
beyond)
    robust="--set optimizer.beta=auto --set optimizer.loss=log"
    with_muon moon --set optimizer.lr=0.005 # the rate that was chosen for muon, and the other way round
    with_muon muon --set optimizer.lr=0.01
    for data in right_factor=10 right_factor=100 right_noise=0.4; do
        for method in moon muon famo+muon; do with_muon $method --set data.$data; done
        with_muon moon --set data.$data $robust
    done
    for setting in beta=auto loss=log; do with_muon moon --set optimizer.$setting; done
    with_muon moon $robust
    for setting in schedule=muon steps=3 steps=8; do with_muon moon --set optimizer.$setting; done
    for mode in forward_mode double_backward per_task; do with_muon moon --set optimizer.delta=$mode; done
    ;;
efficiency) # one after another; in six epochs, since in four FAMO hardly gets to a training loss of 0.15
    alone() { moonopt compare multimnist --out "$RUNS/alone" --jobs 1 --seeds 1 --set train.epochs=6 "$@" || FAILED=1; }
    alone --methods moon,muon --tuned "$RUNS/tuned-muon.json"
    alone --methods famo,mgda,ls --tuned "$RUNS/tuned-adam.json"
    for setting in schedule=muon steps=3 steps=8 delta=forward_mode delta=double_backward delta=per_task; do
        alone --methods moon --tuned "$RUNS/tuned-muon.json" --set optimizer.$setting
    done
    ;;
exact) # one epoch, which takes minutes: 10 to 40 singular value decompositions per matrix and step
    once() { moonopt compare multimnist --out "$RUNS/exact" --jobs 1 --seeds 2 --set train.epochs=1 --methods "$@" || FAILED=1; }
    for setting in dual=exact beta=1e-4 beta=1; do once moon --set optimizer.$setting; done
    once muon
    ;;
*)
    echo "There is no stage $1." >&2
    exit 2
    ;;
esac
finish
