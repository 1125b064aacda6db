# What the scripts of the studies have in common; they source it.

# One file per measurement, which is there when it is whole: its name, the module of moonopt.speed, its options. What is measured is
# not measured again, unless AGAIN=1.
measure() {
    mkdir -p "$SPEED" && file="$SPEED/$1-$GPU.json"
    if [[ -f $file && -z ${AGAIN:-} ]]; then
        echo "$file is kept; AGAIN=1 measures it anew." >&2
        return
    fi
    python -m "moonopt.speed.$2" "${@:3}" --device "$DEVICE" --json >"$file.part" &
    wait $! && mv "$file.part" "$file" || FAILED=1
}

# The rate that a file of `moonopt tune` has chosen for a method.
chosen_rate() { sed -n '/"chosen"/,$p' "$1" | sed -n "/\"$2\": {/,/}/s/.*\"optimizer.lr\": *\([0-9.e-]*\).*/\1/p" | head -n 1; }

# Checkpoints of finished cells, a hundred MB and more each.
tidy() { [[ ! -d $RUNS ]] || find "$RUNS" -name result.json -execdir rm -f checkpoint.pt checkpoint.previous.pt best.pt ';'; }

# Starts a command beside the others.
STARTED=() FAILED=0
start() {
    "$@" &
    STARTED+=($!)
}

# Waits until fewer commands than so many are at work.
room_for() { while (( $(jobs -rp | wc -l) >= $1 )); do wait -n; done; }

# Waits for all that was started, and ends; with 1 where something has failed. The shell remembers how each id has ended.
finish() {
    local each
    for each in "${STARTED[@]}"; do wait "$each" || FAILED=1; done
    exit "$FAILED"
}

# So many of the JOBS as there are cells among all, rounded, and at least one.
share_of() {
    local share=$(( (2 * JOBS * $1 + $2) / (2 * $2) ))
    echo $(( share > 0 ? share : 1 ))
}

# Each moonopt has a process group of its own and gets one signal: a second would end it without a checkpoint.
end_with_checkpoints() {
    set -m
    trap 'trap "" TERM INT; running=$(jobs -rp); [[ -z $running ]] || kill -TERM $running; wait; exit 143' TERM INT
}
