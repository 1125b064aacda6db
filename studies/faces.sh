#!/usr/bin/env bash
# Forty attributes of made-up faces, by a convolutional network and by a ViT (docs/scenes-and-faces.md). What is done is skipped, and what
# is half trained goes on: run it again. After a SIGTERM, as of `timeout 500 studies/faces.sh main`, it ends as soon as all runs have
# written their checkpoints.
#   studies/faces.sh make | speed | tune | main
# By default DEVICE=cuda, JOBS=6 (the cells at once), RUNS=runs, COUNT=6000 faces, BATCH=128, EPOCHS=6, TRIAL=2 (epochs of a trial), SEEDS=1,
# PRECISION=--tf32 (or --amp), PRODUCTS=tf32 (or bfloat16, for the stage speed), SPEED=results/speed (the folder of what that measures),
# GPU=h200 (the end of their names). MORE has settings: MORE="--set model.width=32". Faces are made in $MOONOPT_DATA/celeba.
set -u
. "$(dirname "$0")/common.sh"
end_with_checkpoints
trap tidy EXIT
DEVICE=${DEVICE:-cuda} JOBS=${JOBS:-6} RUNS=${RUNS:-runs} COUNT=${COUNT:-6000} BATCH=${BATCH:-128} EPOCHS=${EPOCHS:-6} TRIAL=${TRIAL:-2}
SEEDS=${SEEDS:-1} PRECISION=${PRECISION:---tf32} PRODUCTS=${PRODUCTS:-tf32} MORE=${MORE:-}
SPEED=${SPEED:-results/speed} GPU=${GPU:-h200}
export OMP_NUM_THREADS=1
NETWORKS=${NETWORKS:-celeba-cnn celeba-vit}
MUON=moon,muon
ADAM=famo,ls
FORTY=mgda,pcgrad,cagrad,imtl-g,nash-mtl # with a backward pass per task: 25 times as long, and trained at the rate of ls

# A command of moonopt in the background, with a share of the JOBS: so many methods of so many that a network has.
beside() {
    local all=$(( $2 * $(wc -w <<< "$NETWORKS") ))
    room_for "$JOBS"
    start python -m moonopt "${@:3}" --device "$DEVICE" $PRECISION --jobs "$(share_of "$1" "$all")" --set "train.batch_size=$BATCH" \
        --set train.log_every=10 --set train.conflict=false $MORE
}
tune() { beside 2 4 tune "$@" --out "$RUNS/tune" --seeds 10, --set "train.epochs=$TRIAL"; }
compare() { beside "$1" 9 compare "${@:2}" --out "$RUNS" --seeds "$SEEDS" --set "train.epochs=$EPOCHS"; }

case ${1:?make, speed, tune or main} in
make) start python -m moonopt data make celeba --out "$MOONOPT_DATA" --count "$COUNT" ;;
speed) # with the GPU to itself
    measure faces-$PRODUCTS faces --products "$PRODUCTS"
    for network in $NETWORKS; do
        measure loading-$network-$PRODUCTS loading $network --data "$MOONOPT_DATA" --products "$PRODUCTS"
    done
    ;;
tune) # three trials for every method with one backward pass
    for network in $NETWORKS; do
        tune $network --methods $ADAM --grid optimizer.lr=3e-4,1e-3,3e-3 --file "$RUNS/tuned-$network-adam.json"
        tune $network --methods $MUON --grid optimizer.lr=5e-3,1e-2,2e-2 --file "$RUNS/tuned-$network-muon.json"
    done
    ;;
main)
    for network in $NETWORKS; do
        tuned="$RUNS/tuned-$network-adam.json"
        if [[ ! -f $tuned ]]; then
            echo "There is no $tuned: run the stage tune first." >&2
            exit 1
        fi
    done
    for network in $NETWORKS; do
        tuned="$RUNS/tuned-$network-adam.json"
        compare 5 $network --methods $FORTY --set "optimizer.lr=$(chosen_rate "$tuned" ls)"
        compare 2 $network --methods $ADAM --tuned "$tuned"
        compare 2 $network --methods $MUON --tuned "$RUNS/tuned-$network-muon.json"
    done
    ;;
*)
    echo "There is no stage $1." >&2
    exit 2
    ;;
esac
finish
