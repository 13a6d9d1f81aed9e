"""Generated from the .proto files beside this one by `make proto`."""
