"""The laws of the prefix tree. Copies in retired pools that are not swept yet count as copies."""

from __future__ import annotations

from collections.abc import Container

from ..copies import Holder, block_at
from ..prefix_tree import Leader, Leaders, Node, PrefixTree, RootNode, Walk
from .findings import Audit, Course
from .world import World


class NodeLaws:
    """Checks each node, as it is. `counted`: nodes whose number of sequences was checked by `count_all`."""

    def __init__(self, world: World, walk: Walk, counted: Container[Node], findings: Audit) -> None:
        self._world = world
        self._tree: PrefixTree = world.tree
        self._walk = walk
        self._counted = counted
        self._findings = findings
        self.suspects: list[Node] = []
        """Other nodes that count sequences, which may have come since."""

    def course(self) -> Course:
        """All of them."""
        tree, walk = self._tree, self._walk
        while (step := walk.step()) is not None:
            node, children = step
            self._node(node)
            for child in children:
                if child.parent is not node or child.depth != node.depth + 1 or node.find(child.tokens) is not child:
                    self._add("tree", f"{child!r} and its parent {node!r} disagree", child)
            yield 4 + 2 * len(children)
        self._findings.num_nodes = walk.num_seen
        if walk.num_unseen:
            self._findings.add(
                "tree", f"{tree.num_nodes - walk.num_unseen} nodes are reachable, {tree.num_nodes} are counted"
            )

    def _add(self, law: str, message: str, node: Node) -> None:
        """Record a violation with a block that holds the node; `Audit.name_owners` adds the owner."""
        for holder in node.holders():
            session = self._world.session_of(holder)
            if session is not None:
                slot = next((slot for slot in range(len(session.pools)) if node.copy_in(holder, slot)), 0)
                self._findings.add(law, message, session, node.copy_in(holder, slot), group=slot)
                return
        self._findings.add(law, message)

    def _node(self, node: Node) -> None:
        if node.is_unused() and self._tree.holds(node) and not self._tree.is_condemned(node):
            self._add("tree", f"{node!r} has no copy, child or sequence and is still there", node)
        if node.num_sequences and node not in self._counted:
            self.suspects.append(node)
        for holder in node.holders():
            self._copies(node, holder)
        if isinstance(node, RootNode):
            self._input(node)
        if node.copies is not None and not node.copies.is_signed():
            self._add("tree", f"{node!r} has a signature that is not of the slots that hold it", node)
        if isinstance(node.leaders, Leaders) and not node.leaders.is_counted():
            self._add("tree", f"{node!r} has counts of leaders that are not of the sequences that lead it", node)
        for leader in node.iter_leaders():
            if not self._lives(leader):
                message = f"{node!r} is led by a sequence that has ended"
                self._findings.add("tree", message, self._world.session_of(leader.holder), -1, leader)

    def _copies(self, node: Node, holder: Holder) -> None:
        blocks = node.blocks_in(holder)
        for slot, pool in enumerate(holder.pools):
            block = block_at(blocks, slot)
            if block and not (0 < block < pool.num_blocks and pool.node(block) is node):
                message = f"{node!r} names block {block} as its copy, which holds something else"
                self._findings.add("sealing", message, self._world.session_of(holder), block, group=slot)
        if (
            holder.whole_slots
            and not holder.retired  # whose pools are swept one after the other
            and any(block_at(blocks, slot) for slot in holder.dependent_slots)
            and not holder.is_complete(blocks)
        ):
            self._add(
                "dependents", f"{node!r} has a copy in a group with a window, and not in all groups without one", node
            )
        if holder.retired and self._world.session_of(holder) is None:
            self._add("tree", f"{node!r} has a copy in a pool of no session", node)

    def _input(self, root: RootNode) -> None:
        for holder in root.input_blocks:
            session = self._world.session_of(holder)
            if session is None:
                self._findings.add("unit", f"{root!r} has the KV of its input in a pool of no session")
            elif not holder.retired:  # else a sweep has perhaps come to some of its blocks
                for group in session.partial:
                    for law, message, block in group.violations_of_input(root):
                        self._findings.add(law, message, session, block, group=group.slot)

    def _lives(self, leader: Leader) -> bool:
        session = self._world.session_of(leader.holder)
        return session is not None and session.sequences.get((leader.key.sequence_id, leader.key.attempt)) is leader
