#!/bin/sh
# Trains chest-xray-vqa on every GPU of this machine; what is not given is measured there.
#   scripts/launch_distributed_training.sh --config examples/chest-xray-vqa.yaml [--num_gpus 4] [--deepspeed] [--debug]
# Every flag of `drivetrain train` works; --torchrun means --use-ddp, and --no_auto means --no-auto-optimize.
set -eu
for word do
  shift
  case $word in
    --torchrun) word=--use-ddp ;;
    --no_auto) word=--no-auto-optimize ;;
  esac
  set -- "$@" "$word"
done
if command -v drivetrain >/dev/null; then
  exec drivetrain train chest-xray-vqa "$@"
fi
exec python3 -m drivetrain train chest-xray-vqa "$@"
