"""Any `nn.Module` as a chain of layers: the elements of a Sequential, or segments of a graph."""
