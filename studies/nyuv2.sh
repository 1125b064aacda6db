#!/usr/bin/env bash
# NYU-v2's own scenes at 96 x 128 pixels (docs/scenes-and-faces.md). What is done is skipped, and what is half trained goes on: run it
# again. After a SIGTERM, as of `timeout 500 studies/nyuv2.sh main`, it ends as soon as all runs have written their checkpoints.
#   studies/nyuv2.sh speed | tune | main
# By default DEVICE=cuda, JOBS=6 (the cells at once), RUNS=runs, TRIAL=16 (epochs of a trial), HELD_OUT=95 (scenes to tune on),
# PRECISION=--tf32 (or --amp), SPEED=results/speed (the folder of what the stage speed measures), GPU=h200 (the end of their names). MORE
# has settings: MORE="--set model.width=24". It wants the scenes, unpacked, in $MOONOPT_DATA/nyuv2_96x128_tree.
set -u
. "$(dirname "$0")/common.sh"
end_with_checkpoints
trap tidy EXIT
BENCH=nyuv2-small
DEVICE=${DEVICE:-cuda} JOBS=${JOBS:-6} RUNS=${RUNS:-runs} TRIAL=${TRIAL:-16} HELD_OUT=${HELD_OUT:-95} PRECISION=${PRECISION:---tf32} MORE=${MORE:-}
SPEED=${SPEED:-results/speed} GPU=${GPU:-h200}
export OMP_NUM_THREADS=1
MUON=moon,muon,famo+muon
TWICE=famo,ls # with two seeds, as those with Muon
ONCE=nash-mtl,mgda,cagrad,uw,stl

# A command of moonopt in the background, with a share of the JOBS: so many cells of all.
beside() {
    room_for "$JOBS"
    start python -m moonopt "${@:3}" --device "$DEVICE" $PRECISION --jobs "$(share_of "$1" "$2")" $MORE
}
compare() { beside "$1" 19 compare $BENCH --out "$RUNS" "${@:2}"; }
tune() {
    beside "$1" 10 tune $BENCH --out "$RUNS/tune" --seeds 10, --set "data.valid_scenes=$HELD_OUT" --set "train.epochs=$TRIAL" \
        --set train.select=last --set "train.schedule=step:$(( (TRIAL + 1) / 2 )):0.5" --set "train.evaluate_every=$TRIAL" \
        --set train.conflict=false "${@:2}"
}

case ${1:?speed, tune or main} in
speed) # with the GPU to itself
    for products in tf32 bfloat16; do
        for method in muon moon nash-mtl; do
            measure loading-$BENCH-$method-$products loading $BENCH --data "$MOONOPT_DATA" --method $method --products $products
        done
    done
    for made in nyuv2:288x384 cityscapes:128x256; do # made-up scenes of the size of the published ones
        bench=${made%:*}
        rm -rf "$RUNS/made"
        python -m moonopt data make $bench --out "$RUNS/made" --count 16 --size ${made#*:} &
        wait $! || exit
        measure loading-$bench-moon-tf32 loading $bench --data "$RUNS/made" --method moon --products tf32
    done
    ;;
tune) # three trials for every method, long enough to tell rates apart
    tune 3 --methods $MUON --grid optimizer.lr=3e-3,1e-2,3e-2 --grid optimizer.vector_lr=2e-3 --file "$RUNS/tuned-muon.json"
    tune 7 --methods $ONCE,$TWICE --grid optimizer.lr=1e-4,3e-4,1e-3 --file "$RUNS/tuned-adam.json"
    ;;
main) # the last is MOON with log-losses and a beta without unit, at MOON's rates
    compare 7 --methods $ONCE --seeds 1 --tuned "$RUNS/tuned-adam.json"
    compare 6 --methods $MUON --seeds 2 --tuned "$RUNS/tuned-muon.json"
    compare 4 --methods $TWICE --seeds 2 --tuned "$RUNS/tuned-adam.json"
    compare 2 --methods moon --seeds 2 --tuned "$RUNS/tuned-muon.json" --set optimizer.beta=auto --set optimizer.loss=log
    ;;
*)
    echo "There is no stage $1." >&2
    exit 2
    ;;
esac
finish
