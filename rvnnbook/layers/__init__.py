"Parts of the encoders: cells, attention, retrieval of neighbors, tree search, chunks, scans."
