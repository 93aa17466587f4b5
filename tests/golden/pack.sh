#!/usr/bin/env bash
# Packs inputs/ with the code in PYTHONPATH, for a new set of golden data: pack.sh FOLDER [NAME ...]
# README.md says when `datasets` may be replaced. `test_golden_datasets.py` reads the lines at the end.
set -euo pipefail
cd "$(dirname "$0")"
folder=$1
shift
chosen=" $* "
test "$#" -gt 0 || test ! -e "$folder"

one() { # NAME INPUT CLASS [OPTION ...]
  [ "$chosen" = "  " ] || [[ "$chosen" == *" $1 "* ]] || return 0
  python -m energon_packed pack "inputs/$2.jsonl" --output-dir "$folder/$1" --tokenizer tokenizer --seq-len 160 \
    --sample-class "$3" --shard-prefix "$1" --workers 1 --max-packs-per-shard 2 "${@:4}"
  rm -rf "$folder/$1/.work"
}

one captions-text texts PackedCaptioningSample
one captions-images images PackedCaptioningSample
one captions-positions positions PackedCaptioningSample
one multimix-text system PackedMultiMixQASample
one multimix-images images PackedMultiMixQASample
one multimix-frames frames PackedMultiMixQASample
one unpacked images MultiMixQASample --unpacked
one tokens-text texts PackedTokensSample
one tokens-images images PackedTokensSample
one stored tokens PackedTokensSample
one special special PackedCaptioningSample
one llava-onevision2 images PackedCaptioningSample --layout llava-onevision2
one weights-captions weights PackedCaptioningSample --record-weight loss
one weights-multimix weights PackedMultiMixQASample --record-weight loss
one weights-tokens weights PackedTokensSample --record-weight loss
