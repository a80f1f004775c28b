#!/bin/bash
# An elastic job of one or two nodes (here two agents on one machine) that loses a node: it goes on
# with the other one from its newest checkpoint. Prints what the first agent said; about a minute.
cd "$(dirname "$0")/../.." || exit 1
repository=$PWD
folder=$(mktemp -d)
cd "$folder" || exit 1
export PYTHONPATH=$repository/scripts/reliability:$repository FAULT=none:none:0 OMP_NUM_THREADS=1
agent() {
    exec python -m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 \
        --rdzv-backend c10d --rdzv-endpoint "localhost:${PORT:-29711}" --rdzv-id elastic \
        --rdzv-conf last_call_timeout=5,join_timeout=60 -m hybridtrain \
        "allow_targets=[faults]" model._target_=faults.model data._target_=faults.data \
        data.batch_size=16 optim=sgd pipeline.nb_part=2 pipeline.chunks=4 "pipeline.split=[2,3]" \
        world.devices=cpu trainer.epochs=null trainer.steps=4000 trainer.log_every=100 \
        trainer.eval_every=null checkpoint.every_steps=200 monitor.tensorboard=false run_name=run
}
(agent >first.txt 2>&1) &
first=$!
sleep 3
(agent >second.txt 2>&1) &
second=$!
for _ in $(seq 200); do
    grep -q "step 400/" first.txt second.txt && break
    sleep 1
done
echo "killing the second agent and its worker at $(date +%T)"
# shellcheck disable=SC2046 # one worker, one id
kill -9 "$second" $(pgrep -P "$second")
wait "$first"
echo "the first agent ended with $? at $(date +%T)"
grep -E "process(es)? x|resumed|^error:|^done:" first.txt
grep "resumed from" outputs/run/logs/rank_000.log
