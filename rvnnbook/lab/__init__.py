"Experiments: training (`lab.train.train`), runs, sweeps, records, tables and benchmarks."
