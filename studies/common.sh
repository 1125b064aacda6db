# What the scripts of the studies have in common; they source it.

# One file per measurement, which is there when it is whole: its name, the module of moonopt.speed, its options. What is measured is
# not measured again, unless AGAIN=1.
measure() {
    mkdir -p "$SPEED" && file="$SPEED/$1-$GPU.json"
    [[ -f $file && -z ${AGAIN:-} ]] && return
    python -m "moonopt.speed.$2" "${@:3}" --device "$DEVICE" --json >"$file.part" && mv "$file.part" "$file"
}

# Checkpoints of finished cells, a hundred MB and more each.
tidy() { find "$RUNS" -name result.json -execdir rm -f checkpoint.pt checkpoint.previous.pt best.pt ';'; }

# Each moonopt has a process group of its own and gets one signal: a second would end it without a checkpoint.
end_with_checkpoints() {
    set -m
    trap 'trap "" TERM INT; kill -TERM $(jobs -rp); wait; exit 143' TERM INT
}
