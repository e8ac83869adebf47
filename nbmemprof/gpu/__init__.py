"""The GPU itself: device code compiled and timed (probes), and hardware counters of anybody's kernels (counters)."""
