"""What a rank records while it runs: events, step times, collectives, usage, profiler windows.

It offers `events.Events` to write a rank's file and the only parser of it, `step_timer` for where a
step's time goes, and `clock_offset` to compare the clocks of ranks; it needs no process group.
"""
