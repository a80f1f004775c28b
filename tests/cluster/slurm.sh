#!/usr/bin/env bash
# A real Slurm on one machine: a controller and NODES nodes, each in namespaces of its own (network,
# host name, processes, mounts). Nothing is made outside of them, and one process id ends it all.
#
#   slurm.sh hold FOLDER [NODES [SPARE]]
#
# starts it, prints "ready", and ends it when standard input ends. SPARE more nodes have a network, and
# are not part of Slurm. Each node has a monotonic clock of its own, where the kernel can do that.
#
# tests/cluster/conftest.py calls it. Inside, FOLDER/init.pid is the process to enter the controller's
# namespaces by, and FOLDER/n1.pid that of the node n1, as the controller's namespace numbers it.
set -euo pipefail
self=$(readlink -f "${BASH_SOURCE[0]}")
command=$1 folder=$(readlink -f "$2")
export SLURM_CONF=$folder/slurm.conf
network=10.77.0
apart=(unshare --mount --uts --ipc --net --pid --fork --kill-child --mount-proc --propagation private)

write_config() { # NODES SPARE
    mkdir -p "$folder"/{log,state,private}
    for i in $(seq $(($1 + $2))); do mkdir -p "$folder"/{spool,disk}/"n$i"; done
    {
        echo "127.0.0.1 localhost"
        echo "$network.254 controller"
        # also as an IPv6 socket shows them, or torch warns that it finds no name
        for i in $(seq $(($1 + $2))); do printf "$network.$i n$i\n::ffff:$network.$i n$i\n"; done
    } >"$folder/hosts"
    cat >"$SLURM_CONF" <<END
ClusterName=test
SlurmctldHost=controller($network.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
# also how long a requeued job waits; less than 5 is refused
AuthInfo=cred_expire=5
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmdSpoolDir=$folder/spool/%n
StateSaveLocation=$folder/state
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.%n.log
# a sandbox has neither cgroups nor pinning
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdTimeout=60
KillWait=5
MessageTimeout=20
ReturnToService=2
MinJobAge=600
JobRequeue=1
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0,sched_min_interval=10000
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-$1] NodeAddr=$network.[1-$1] CPUs=16 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=scavenge Nodes=ALL State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
END
    # any character device will do as a GPU: Slurm sets CUDA_VISIBLE_DEVICES
    echo "NodeName=n[1-$1] Name=gpu File=/dev/tty[1-2]" >"$folder/gres.conf"
    echo "CgroupAutomount=no" >"$folder/cgroup.conf"
}

child_of() { # the one child of a process, once it is there
    local kid=
    for _ in $(seq 200); do
        read -r kid _ <"/proc/$1/task/$1/children" || true
        [ -n "$kid" ] && { echo "$kid"; return; }
        sleep 0.05
    done
    return 1
}

start_node() { # n1 slurmd|spare
    local pid clock=()
    if unshare --time true 2>/dev/null; then clock=(--time --monotonic $((${1#n} * 1000))); fi
    "${apart[@]}" "${clock[@]}" "$self" node "$folder" "$1" "$2" >"$folder/log/$1.log" 2>&1 &
    pid=$(child_of $!)
    echo "$pid" >"$folder/$1.pid"
    ip link add "to-$1" type veth peer name eth0 netns "$pid"
    ip link set "to-$1" master bridge up
}

wait_for_ever() { # as process 1 of a namespace
    trap 'exit 0' TERM INT
    while :; do sleep 3600 & wait $! || true; done
}

case $command in
hold)
    nodes=${3:-3} spare=${4:-0}
    write_config "$nodes" "$spare"
    # also when this script is killed, the cluster ends
    setpriv --pdeathsig KILL "${apart[@]}" "$self" controller "$folder" "$nodes" "$spare" \
        </dev/null >"$folder/log/init.log" 2>&1 &
    init=$(child_of $!)
    trap 'kill -KILL $init 2>/dev/null || true' EXIT
    echo "$init" >"$folder/init.pid"
    inside=(nsenter -t "$init" -m -u -i -n -p --)
    for _ in $(seq 300); do
        idle=$("${inside[@]}" sinfo -h -N -t idle -o %N 2>/dev/null | wc -l)
        up=$(find "$folder" -maxdepth 1 -name 'n*.up' | wc -l)
        [ "$idle" -ge "$nodes" ] && [ "$up" -ge $((nodes + spare)) ] && break
        sleep 0.1
    done
    if [ "$idle" -lt "$nodes" ] || [ "$up" -lt $((nodes + spare)) ]; then
        tail -n 5 "$folder"/log/*.log >&2
        exit 1
    fi
    echo ready
    cat >/dev/null
    ;;
controller)
    hostname controller
    mount --bind "$folder/hosts" /etc/hosts
    ip link set lo up
    ip link add bridge type bridge
    ip addr add "$network.254/24" dev bridge
    ip link set bridge up
    if unshare --time true 2>/dev/null; then echo "clocks"; fi
    slurmctld -f "$SLURM_CONF"
    for i in $(seq $(($3 + $4))); do
        start_node "n$i" "$([ "$i" -le "$3" ] && echo slurmd || echo spare)"
    done
    wait_for_ever
    ;;
node)
    hostname "$3"
    ip link set lo up
    for _ in $(seq 200); do ip link show eth0 >/dev/null 2>&1 && break; sleep 0.05; done
    ip addr add "$network.${3#n}/24" dev eth0
    ip link set eth0 up
    touch "$folder/$3.up"
    mount -t tmpfs tmpfs /dev/shm
    mount --bind "$folder/disk/$3" "$folder/private" # one path, another disk on each node
    if [ "$4" = slurmd ]; then slurmd -N "$3" -f "$SLURM_CONF"; fi
    wait_for_ever
    ;;
*)
    sed -n '2,13p' "$self"
    exit 2
    ;;
esac
