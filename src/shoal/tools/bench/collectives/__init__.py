"""Measure collectives over sizes and backends, and write the machine file."""
