"""Output of PBS's commands as others have published it, shortened, with neutral names."""

from __future__ import annotations

JOBS = """\
Job Id: 7013474.pbs1.example.org
    Job_Name = job-01.pbs
    Job_Owner = user@login.example.org
    job_state = Q
    queue = v1_gpu72
    Error_Path = login.example.org:/rds/general/user/user/home/project-
\tdirectory/scripts/job-01.pbs.e7013474
    Hold_Types = n
    Resource_List.ncpus = 4
    Resource_List.ngpus = 1
    Resource_List.nodect = 1
    Resource_List.select = 1:ncpus=4:mem=8gb:ngpus=1:gpu_type=RTX6000:mpiprocs=
\t4:ompthreads=1
    Resource_List.walltime = 72:00:00
    substate = 10
    Variable_List = PBS_O_SYSTEM=Linux,PBS_O_SHELL=/bin/bash,
\tPBS_O_HOME=/rds/general/user/user/home,PBS_O_LOGNAME=user,
\tPBS_O_HOST=login.example.org
    comment = Not Running: Insufficient amount of resource: ncpus\x20
    etime = Mon Feb 13 19:00:07 2023

Job Id: 412020.pbs1.example.org
    Job_Name = train
    job_state = H
    queue = preemptable
    Hold_Types = s
    Rerunable = False
    Resource_List.select = 1:system=blue
    Resource_List.walltime = 08:00:00
    substate = 20
    comment = job held, too many failed attempts to run
    run_count = 21
    Exit_status = -3

Job Id: 4.pbs1.example.org
    Job_Name = STDIN
    resources_used.cpupercent = 0
    resources_used.ncpus = 1
    resources_used.walltime = 00:00:10
    job_state = R
    queue = workq
    exec_host = execute-2/0
    Resource_List.place = scatter:excl
    Resource_List.walltime = 24:00:00
    Variable_List = PBS_O_SYSTEM=Linux,BASH_FUNC_module%%=() {  eval "$@"\\,
    job_state = X
}
    run_count = 1

"""
"""`qstat -f`: of Imperial College, in the tests of schedtools for Python; of Polaris, as JSON in
github.com/jtchilders/python_tools, pbs/pbsqstat.py; and github.com/openpbs/openpbs/issues/2541, whose
environment has functions of bash."""

ARRAY = """\
Job Id: 7[].pbs
    Job_Name = train
    job_state = B
    queue = workq
    array = True
    array_state_count = Queued:1 Running:1 Exiting:0 Expired:1\x20
    array_indices_submitted = 0-2
    array_indices_remaining = 2

Job Id: 7[0].pbs
    job_state = X
    comment = Job run at Tue Oct 11 at 08:13 on (node01:ncpus=1) and finished
    Exit_status = 0

Job Id: 7[1].pbs
    job_state = R
    exec_host = node01/0

Job Id: 7[2].pbs
    job_state = Q
    comment = Can Never Run: Insufficient amount of resource: ncpus (R: 2 A: 1
\t T: 1)

"""
"""An array as in github.com/QutEcoacoustics/baw-server (spec/lib/gems/pbs, OpenPBS 22.05); the
states of its elements are in qstat(1B), the comment in OpenPBS's tests, pbs_allpart.py."""

GONE = "qstat: Unknown Job Id 9156.pbs-01\n"
FINISHED = "qstat: 9157.pbs-01 Job has finished, use -x or -H to obtain historical job information\n"
"""src/lib/Liblog/pbs_messages.c and src/cmds/qstat.c of OpenPBS."""

UNREACHED = "Connection refused\nqstat: cannot connect to server pbs (errno=15010)\n"
"""github.com/QutEcoacoustics/baw-server/issues/776."""

UNKNOWN_QUEUE = "qstat: Unknown queue nowhere\n"
TOO_MUCH = "qsub: Job violates queue and/or server resource limits\n"
"""src/lib/Liblog/pbs_messages.c of OpenPBS."""

QUEUES = """\
Queue: debug
    queue_type = Execution
    Priority = 150
    total_jobs = 40
    state_count = Transit:0 Queued:27 Held:13 Waiting:0 Running:0 Exiting:0 Beg
\tun:0\x20
    resources_max.nodect = 2
    resources_max.walltime = 01:00:00
    resources_min.nodect = 1
    resources_min.walltime = 00:05:00
    max_run = [u:PBS_GENERIC=1]
    enabled = True
    started = True

Queue: workq
    queue_type = Execution
    total_jobs = 0
    hasnodes = True
    enabled = True
    started = True

Queue: small
    queue_type = Execution
    from_route_only = True
    resources_max.nodect = 24
    resources_max.walltime = 03:00:00
    enabled = True
    started = True

Queue: closed
    queue_type = Route
    enabled = False
    started = True

"""
"""`qstat -Qf`: of Polaris, as quoted in public logs (2025; docs.alcf.anl.gov has the limits); `workq`
of a new OpenPBS, in the manual of github.com/buildtesters/buildtest."""

NODES = """\
x3002c0s7b1n0
     Mom = x3002c0s7b1n0.hsn.example.org
     Port = 15002
     pbs_version = 2022.1.1.20220926110806
     ntype = PBS
     state = free
     pcpus = 64
     resources_available.arch = linux
     resources_available.gputype = A100
     resources_available.mem = 527672492kb
     resources_available.ncpus = 64
     resources_available.ngpus = 4
     resources_available.vnode = x3002c0s7b1n0
     resources_assigned.ngpus = 0
     sharing = force_exclhost
     last_state_change_time = Tue Nov 15 19:26:39 2022

x3009c0s19b0n0
     Mom = x3009c0s19b0n0.hsn.example.org
     state = down
     queue = workq
     resources_available.ncpus = 32
     comment = node down: communication closed

"""
"""`pbsnodes` of Polaris: github.com/argonne-lcf/user-guides, docs/running-jobs/index.md; the `queue`
of a node is in pbs_node_attributes(7B)."""
