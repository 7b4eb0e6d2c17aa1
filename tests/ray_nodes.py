"""Starts Ray nodes on this machine, in a process of its own, and does what it is told on stdin.

    add NAME     start a node; prints "NAME READY"
    kill NAME    kill a node, its raylet and all on it; prints "NAME GONE"
    end NAME     let a node end as it should, which the others know at once; prints "NAME GONE"

The first line that it prints is the cluster's address. It ends, with all nodes, when stdin does.
"""

import json
import sys

from ray.cluster_utils import Cluster


def main(node, head):
    head = {**node, "include_dashboard": False, **head}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {}
    print(cluster.address, flush=True)
    for line in sys.stdin:
        what, name = line.split()
        if what == "add":
            nodes[name] = cluster.add_node(**node, resources={name: 1})
        else:
            cluster.remove_node(nodes.pop(name), allow_graceful=what == "end")
        print(name, "READY" if what == "add" else "GONE", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(*map(json.loads, sys.argv[1:]))
