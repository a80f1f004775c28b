#!/usr/bin/env bash
# Runs all benchmarks, one after the other, and prints their tables. The machine should have nothing
# else to do. Peers: pip install -e ".[bench]".
#
#   scripts/bench/run_all.sh            all of them
#   scripts/bench/run_all.sh memory ddp some of them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tables=("$@")
[ ${#tables[@]} -gt 0 ] ||
    tables=(schedule_efficiency real_compute host_cost loop_overhead cold_start memory construction split_quality ddp checkpoints exactness)
begin=$SECONDS
for table in "${tables[@]}"; do
    start=$SECONDS
    printf '## %s\n\n' "$table"
    "${PYTHON:-python3}" -m "scripts.bench.$table"
    printf '%s took %d s\n\n' "$table" $((SECONDS - start))
done
printf 'all took %d s\n' $((SECONDS - begin))
