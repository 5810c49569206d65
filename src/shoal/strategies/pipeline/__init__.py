"""Pipeline parallelism: stages cut from an ordinary model, and their schedules."""
