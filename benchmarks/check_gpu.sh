#!/usr/bin/env bash
# What to look at on a machine with a GPU, in one go; each output is kept, and a step that fails does not end the others.
#
#   bash benchmarks/check_gpu.sh [folder]               # one GPU, about an hour
#   DEVICE=cpu bash benchmarks/check_gpu.sh [folder]    # the same commands, small, to see that they work
#
# NOT YET RUN ON A GPU. Read afterwards: summary.txt (exit codes), runs.txt (images/s and peak memory of each run), waits.txt (warnings
# belong to rows of the log, saves and ends only). Bars for one H100: resnet50d at 336 px 1,100 images/s, goal 1,750; BasicNet 20 times
# the plain loop.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-gpu-checks}")
python=${PYTHON:-python} device=${DEVICE:-cuda}
if [[ $device == cpu ]]; then
  net="model=timm model.name=test_resnet" vit="model=timm model.name=test_vit" data="data.source=embedded"
  side=32 large=32 batch=8 big=16 steps=4 precisions="32-true bf16-mixed" more="--quick --segment 2 --rounds 1" recipes=basic_net
else
  net="model=resnet50d" vit="model=timm model.name=vit_large_patch16_224" data="data=cifar10"
  side=224 large=336 batch=64 big=2048 steps=100 precisions="32-true bf16-mixed 16-mixed" more="" recipes="basic_net resnet50d"
fi
mkdir -p "$out"
short="trainer.max_steps=$steps trainer.log_every_n_steps=$((steps / 4)) trainer.limit_val_batches=1 trainer.limit_test_batches=1"

step() { # name, command
  local name=$1 began=$SECONDS code=0
  shift
  "$@" >"$out/$name.txt" 2>&1 || code=$?
  echo "exit code $code, $((SECONDS - began)) s: $name" | tee -a "$out/summary.txt"
}
train() { # name of the run, options
  step "$1" "$python" train.py "trainer.accelerator=$device" "runs_dir=$out/runs" "run=$1" "${@:2}"
}

train default
step tests "$python" -m pytest -n0 -q tests/data/test_loaders.py tests/strategies tests/training/test_oom.py
step waits "$python" -W always -c "import runpy, sys, torch
if torch.cuda.is_available(): torch.cuda.set_sync_debug_mode('warn')
sys.argv[0] = 'train.py'
runpy.run_path('train.py', run_name='__main__')" "trainer.accelerator=$device" "runs_dir=$out/runs" run=waits $short

for run in exact-1 exact-2; do train $run trainer.deterministic=true trainer.log_every_n_steps=1 trainer.max_steps=$steps; done
step exact "$python" scripts/compare_runs.py exact-1 exact-2 --exact --runs-dir "$out/runs"
for strategy in single ddp fsdp; do
  train parity-$strategy strategy=$strategy trainer.devices=1 trainer.precision=32-true optim=sgd optim.lr=0.003 \
    model.dropout_conv=0 model.dropout_fc=0 trainer.log_every_n_steps=1 trainer.max_steps=$steps
done
for strategy in ddp fsdp; do
  step parity-of-$strategy "$python" scripts/compare_runs.py parity-single parity-$strategy --runs-dir "$out/runs"
done

images="$net $data data.batch_size=$batch data.eval_batch_size=$batch $short"
for precision in $precisions; do
  for layout in true false; do
    for search in true false; do
      train "speed-$precision-channels-last-$layout-search-$search" $images data.image_size=$side \
        trainer.precision=$precision channels_last=$layout trainer.benchmark=$search trainer.enable_checkpointing=false
    done
  done
done
train speed-$large $images data.image_size=$large trainer.enable_checkpointing=false
for strategy in single fsdp; do
  train vit-$strategy $vit $data strategy=$strategy trainer.devices=1 data.batch_size=$batch data.eval_batch_size=$batch data.image_size=$side $short
done
for background in true false; do
  train saving-background-$background $images data.image_size=$side checkpoint.background=$background checkpoint.every_n_steps=$((steps / 4))
done
for compile in true false; do
  train compile-$compile $images data.image_size=$side compile=$compile trainer.enable_checkpointing=false
done
train accumulate $net $data data.image_size=$large data.batch_size=$big data.eval_batch_size=$batch $short trainer.max_steps=4 \
  trainer.log_every_n_steps=1 trainer.accumulate_grad_batches=auto

for recipe in $recipes; do
  step "benchmark-$recipe" "$python" benchmarks/benchmark.py --device $device --recipe $recipe $more \
    --also compile=true --also trainer.benchmark=true
done
step runs "$python" scripts/runs.py --runs-dir "$out/runs"
