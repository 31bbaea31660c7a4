"""What needs a cluster, as a discrete-event model over core's cost model. It begins with chapter 02."""
