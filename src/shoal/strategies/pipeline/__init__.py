"""Pipeline parallelism: stages of an ordinary model, and their schedules."""
