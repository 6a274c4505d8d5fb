"""How fast it is, and against whom: `python -m benchmarks [table …] [--quick] [--json]`.

    rounds      measures every contestant once per round, in turn, and judges the bars
    ground      what they stand on: one server, worker processes, a child that prints into a pipe
    peers       the worker processes: ours, arq's, SAQ's
    queue · output · latency · stall      one table each, all of one shape: `table(ground, quick) -> Table`

`docs/benchmarks.md` says what each table means.
"""
