"""Maps of memory: which addresses were taken, when, and by which size class, as an image."""

from typing import Any

import attrs
import numpy as np

from arenax import Trace

# Of the image: it is scaled, and finer detail than this would not be seen on any screen.
COLUMNS, ROWS = 640, 360
# How opaque is what was asked for, what a chunk is rounded up by, and a slot that nobody has.
ASKED, ROUNDED, IDLE = 255, 130, 70
GREY = (128, 128, 128)

Image = np.ndarray[Any, np.dtype[np.uint8]]
Colours = list[tuple[int, int, int]]


@attrs.define(eq=False)
class Occupancy:
    """Who was where, and when; an observer of `replay`.

    Attributes:
        keeps_slots: Whether a chunk stays its allocator's when it is freed, as a pool's slot does.
        reserves_ahead: Whether it was so from the beginning, as with a plan.
        lives: For each chunk that was allocated the buffer, the event, the address, and the chunk's bytes.
        ends: The event that freed a buffer.
    """

    keeps_slots: bool = False
    reserves_ahead: bool = False
    lives: list[tuple[int, int, int, int]] = attrs.field(factory=list)
    ends: dict[int, int] = attrs.field(factory=dict)

    def __call__(self, event: int, buffer: int, size: int, address: int | None) -> None:
        """See `Observer`."""
        if address is None:
            self.ends[buffer] = event
        else:
            self.lives.append((buffer, event, address, size))

    @property
    def height(self) -> int:
        """The highest address that was ever part of a chunk."""
        return max((address + size for _, _, address, size in self.lives), default=0)

    def image(self, trace: Trace, class_of: list[int], colours: Colours, height: int) -> Image:
        """Paints the map: events from left to right, addresses from the bottom up, empty where nobody is.

        Args:
            trace: The trace.
            class_of: The number of each buffer's class.
            colours: That of each class.
            height: The address at the top.

        Returns:
            Rows from the top down of red, green, blue and alpha.

        Example:
            >>> from arenax_stress._lab_map import Occupancy
            >>> trace, map = Trace.from_events([("allocate", "a", 512), ("free", "a", 0)]), Occupancy()
            >>> map(0, 0, 512, 0), map(1, 0, 512, None)
            (None, None)
            >>> map.image(trace, [0], [(9, 9, 9)], 1024)[[0, -1]][:, [0, -1]].tolist()
            [[[0, 0, 0, 0], [0, 0, 0, 0]], [[9, 9, 9, 255], [0, 0, 0, 0]]]
        """
        canvas = np.zeros((ROWS, COLUMNS, 4), np.uint8)
        end = max(len(trace.steps), 1)

        def paint(
            events: tuple[int, int], addresses: tuple[int, int], colour: tuple[int, int, int], alpha: int
        ) -> None:
            left, right = (round(event * COLUMNS / end) for event in events)
            bottom, top = (round(address * ROWS / max(height, 1)) for address in addresses)
            # What is too small or too short is a dot all the same: a map that leaves out what pins memory would lie.
            left, bottom = min(left, COLUMNS - 1), min(bottom, ROWS - 1)
            area = canvas[ROWS - max(top, bottom + 1) : ROWS - bottom, left : max(right, left + 1)]
            area[..., :3], area[..., 3] = colour, alpha

        if self.keeps_slots:
            for _, event, address, size in self.lives:
                paint((0 if self.reserves_ahead else event, end), (address, address + size), GREY, IDLE)
        sizes = trace.sizes.tolist()
        # The largest last: a dot is seen where nothing else is, and does not hide what is a thousand times its size.
        for buffer, event, address, size in sorted(self.lives, key=lambda life: life[3]):
            events, colour = (event, self.ends.get(buffer, end)), colours[class_of[buffer]]
            paint(events, (address, address + size), colour, ROUNDED)
            paint(events, (address, address + sizes[buffer]), colour, ASKED)
        return canvas
