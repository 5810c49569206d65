"""`shoal verify`: runs a training script in variants and compares what its ranks did.

`hooks` records in each rank; `variants` starts the runs; `observations` holds the records; `properties`
and `causes` decide from them and are pure.
"""
