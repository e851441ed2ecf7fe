"""The page of `everstep ui`: a server that reads the index and the journals, and changes no run."""
