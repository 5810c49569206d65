"""The records of a rank while it runs: events, step times, collectives, usage, profiler windows.

`events.Events` writes a rank's file, and `events` has the only parser of it. `step_timer` measures the
parts of a step, and `clock_offset` compares the clocks of ranks. No process group is needed.
"""
