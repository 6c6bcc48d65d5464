"""Minimum cuts of networks with integer capacities, by Dinic's algorithm.

Distances are counted towards the sink, and the cut found is the one nearest to it.

source   E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power
         estimation", Soviet Math. Doklady 11 (1970)
"""

from __future__ import annotations


class Network:
    """A directed network of `count` vertices, numbered from 0."""

    def __init__(self, count: int) -> None:
        # Arc 2k leads where arc 2k+1 comes from: pushing through one makes room in the other.
        self._arcs: list[list[int]] = [[] for _ in range(count)]
        self._head: list[int] = []
        self._room: list[int] = []

    def add(self, tail: int, head: int, capacity: int) -> None:
        """An arc from `tail` to `head`."""
        self._arcs[tail].append(len(self._head))
        self._arcs[head].append(len(self._head) + 1)
        self._head += (head, tail)
        self._room += (capacity, 0)

    def minimum_cut(self, source: int, sink: int) -> tuple[int, bytearray]:
        """Push a maximum flow: its value, and for each vertex whether it is on the sink's side.

        The arcs into that side from the rest are a minimum cut. Call it once.
        """
        value = 0
        while True:
            distance = self._distances(sink)
            if distance[source] < 0:
                return value, bytearray(d >= 0 for d in distance)
            value += self._push_all(source, sink, distance)

    def _distances(self, sink: int) -> list[int]:
        """How many arcs with room lead from each vertex to the sink; -1 where none do."""
        arcs, head, room = self._arcs, self._head, self._room
        distance = [-1] * len(arcs)
        distance[sink] = 0
        row = [sink]
        for at in row:
            further = distance[at] + 1
            for arc in arcs[at]:
                if room[arc ^ 1] and distance[head[arc]] < 0:
                    distance[head[arc]] = further
                    row.append(head[arc])
        return distance

    def _push_all(self, source: int, sink: int, distance: list[int]) -> int:
        """Push along shortest paths until none is left; how much."""
        arcs, head, room = self._arcs, self._head, self._room
        tried = [0] * len(arcs)  # arcs of each vertex that lead nowhere any more
        path: list[int] = []
        total = 0
        at = source
        while True:
            if at == sink:
                amount = min([room[arc] for arc in path])
                total += amount
                full = 0
                for k in range(len(path) - 1, -1, -1):
                    arc = path[k]
                    room[arc] -= amount
                    room[arc ^ 1] += amount
                    if not room[arc]:
                        full = k
                at = head[path[full] ^ 1]
                del path[full:]
                continue
            row, k = arcs[at], tried[at]
            nearer = distance[at] - 1
            while k < len(row) and not (room[row[k]] and distance[head[row[k]]] == nearer):
                k += 1
            tried[at] = k
            if k < len(row):
                path.append(row[k])
                at = head[row[k]]
            elif path:
                arc = path.pop()
                at = head[arc ^ 1]
                tried[at] += 1
            else:
                return total
