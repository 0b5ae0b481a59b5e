#!/bin/sh
# Made by `cargo x gpu`: tests and benches on a machine with a GPU. No Rust is needed.
#
#   sh run.sh         everything
#   sh run.sh tests   the tests, and the op table once more under compute-sanitizer
#   sh run.sh rows    Paceline beside PyTorch: a line for each work, then all of them as a table
#
# Where python3 has torch with CUDA, its models are compiled first, all at once and beside the tests; what is timed is timed alone.
cd "$(dirname "$0")" || exit 1
tests='' rows=''
case "${1:-all}" in
  all) tests=1 rows=1 ;;
  tests) tests=1 ;;
  rows) rows=1 ;;
  *)
    echo "usage: sh run.sh [tests | rows]" >&2
    exit 2
    ;;
esac
rm -rf logs
mkdir -p logs
export PACELINE_CACHE="${PACELINE_CACHE:-$PWD/cache}"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$PWD/cache/inductor}"
export TORCHINDUCTOR_FX_GRAPH_CACHE=1 TORCHINDUCTOR_AUTOGRAD_CACHE=1
for folder in $(python3 -c 'import glob, sys; print(*[f for p in sys.path for f in glob.glob(p + "/nvidia/*/lib")])' 2>/dev/null); do
  LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
done
export LD_LIBRARY_PATH
passed=0 failed=0 skipped=0 failures='' began=$(date +%s)
# What runs ends with the script.
running='' preparing=''
trap 'kill $running $preparing 2> /dev/null; exit 1' INT TERM

# part NAME SECONDS COMMAND...
part() {
  name=$1 seconds=$2
  shift 2
  if ! command -v "$1" > /dev/null; then
    echo "skipped: $name: this machine has no $1"
    skipped=$((skipped + 1))
    return
  fi
  echo "== $name, at $(($(date +%s) - began)) s"
  # In the background, so that a signal reaches the trap at once.
  timeout -k 10 "$seconds" "$@" > "logs/$name.log" 2>&1 &
  running=$!
  wait $running
  code=$? running=''
  grep -E '^(test result:|skipped:|gpus |losses |on the CPU: )|cuda:|ERROR SUMMARY|images/s|panicked' "logs/$name.log"
  if [ $code -eq 0 ]; then
    passed=$((passed + 1))
  elif grep -q 'Device not supported' "logs/$name.log"; then
    echo "skipped: $name: $1 does not know this machine's GPU"
    skipped=$((skipped + 1))
  else
    [ $code -eq 124 ] && echo "$name was ended after $seconds s"
    tail -n 20 "logs/$name.log"
    failed=$((failed + 1)) failures="$failures $name"
  fi
}

# Whether PyTorch can be asked: found out once.
peer=''
has_peer() {
  if [ -z "$peer" ]; then
    peer=no
    python3 -c 'import sys, torch, torchvision; sys.exit(not torch.cuda.is_available())' > /dev/null 2>&1 && peer=yes
  fi
  [ $peer = yes ]
}

# prepare MODEL SIDE BATCH SECONDS: compiles both of PyTorch's compiled modes, in processes of their own that only leave their caches.
prepare() {
  for mode in compile graphs; do
    TORCHINDUCTOR_COMPILE_THREADS=2 timeout -k 10 "$4" python3 peer_gpu.py "$1" "$2" "$3" --modes $mode --prepare \
      > "logs/prepare-$1-$2-$mode.txt" 2>&1 &
    preparing="$preparing $!"
  done
}

# row MODEL SIDE BATCH SECONDS: losses beside the CPU's; Paceline, PyTorch, Paceline; then a line of the table.
row() {
  work="$1-$2"
  step="./paceline bench step --device cuda --model $1 --size $2 --classes 1000 --dtype bf16"
  rm -f "logs/$work.weights"
  # shellcheck disable=SC2086
  part "check-$work" 120 $step --batch 8 --calibrate off --check "logs/$work.weights"
  rm -f "logs/$work.weights"
  ours="$step --batch $3 --steps 7 --json"
  # shellcheck disable=SC2086
  part "bench-$work-first" 120 $ours
  if has_peer; then
    part "torch-$work" "$4" python3 peer_gpu.py "$1" "$2" "$3" --limit $(($4 / 2))
  fi
  # shellcheck disable=SC2086
  part "bench-$work-second" 60 $ours
  line "$1" "$2" "$3" | tee -a logs/table.txt
}

# What the logs of a work say, as a line: ours may have been measured once, theirs not at all.
line() {
  cat "logs/bench-$1-$2-first.log" "logs/bench-$1-$2-second.log" "logs/torch-$1-$2.log" 2> /dev/null | awk -v work="$1 $2² b$3" '
    function number(name) {
      match($0, "\"" name "\":[0-9.e+]+")
      return substr($0, RSTART + length(name) + 3, RLENGTH - length(name) - 3) + 0
    }
    function thousands(x, text, rest) {
      text = sprintf("%.0f", x)
      while (length(text) > 3) { rest = "," substr(text, length(text) - 2) rest; text = substr(text, 1, length(text) - 3) }
      return text rest
    }
    /"images_per_s":/ {
      rate = number("images_per_s"); sum += rate; runs++
      shown = shown (runs > 1 ? " · " : "") thousands(rate)
      gib = number("peak_bytes") / 1073741824
    }
    /^torch .* images\/s/ && $6 + 0 > best { best = $6 + 0; mode = $5; theirs = $(NF - 1) }
    END {
      printf "| %s | %s | ", work, runs ? shown : "–"
      if (best) printf "%s (%s) | ", thousands(best), mode; else printf "– | "
      if (best && runs) printf "%.2f | ", sum / runs / best; else printf "– | "
      if (runs) printf "%.3f : ", gib; else printf "– : "
      printf "%s |\n", best ? theirs : "–"
    }'
}

[ $rows ] && {
  if has_peer; then
    @PREPARE@
  else
    echo "skipped: PyTorch: this machine's python3 has no torch with CUDA"
    skipped=$((skipped + 1))
  fi
}
[ $tests ] && {
  @TESTS@
}
[ $rows ] && {
  for process in $preparing; do wait "$process" || echo "PyTorch did not compile everything: see logs/prepare-*.txt"; done
  [ "$preparing" ] && echo "PyTorch has compiled at $(($(date +%s) - began)) s"
  preparing=''
  @ROWS@
  echo "| work | Paceline, images/s | PyTorch's best | ratio | GPU memory, GiB, ours : theirs |"
  echo "|---|---|---|---|---|"
  cat logs/table.txt
}

count() { cat logs/*.log | grep '^test result:' | sed "s/.* \([0-9]*\) $1.*/\1/" | awk '{ sum += $1 } END { print sum + 0 }'; }
echo "parts: $passed passed, $failed failed, $skipped skipped${failures:+; failed:$failures}; $(($(date +%s) - began)) s"
echo "tests: $(count passed) passed, $(count failed) failed, $(cat logs/*.log | grep -c '^skipped:') reported themselves skipped"
[ $failed -eq 0 ]
