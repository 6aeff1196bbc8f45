"""A world with state: rooms in a row, a key in one of them, and a chest behind a locked door."""

ROOMS = ("hall", "library", "kitchen", "cellar")


class Treasure:
    """One game. Points: a third each for the key, the door and the chest."""

    def __init__(self) -> None:
        self.done = False
        self._place = 0
        self._key_room = 0
        self._has_key = self._is_unlocked = False

    def reset(self, key_room: str = "kitchen") -> str:
        """Begin; the question's row may say where the key lies."""
        self._key_room = ROOMS.index(key_room)
        return self._look()

    def go(self, direction: str) -> str:
        """Walk to the next room.

        Args:
            direction: "left" or "right".
        """
        step = {"left": -1, "right": 1}[direction.strip().lower()]
        if not 0 <= self._place + step < len(ROOMS):
            return f"There is a wall. {self._look()}"
        self._place += step
        return self._look()

    def take_key(self) -> str:
        """Pick up the key that lies in this room."""
        if self._has_key or self._place != self._key_room:
            return f"There is no key here. {self._look()}"
        self._has_key = True
        return "You have the key."

    def unlock_door(self) -> str:
        """Unlock the door at the end of the cellar with the key."""
        if ROOMS[self._place] != "cellar":
            return f"There is no door here. {self._look()}"
        if not self._has_key:
            return "The door is locked, and you have no key."
        self._is_unlocked = True
        return "The door is open. Behind it stands a chest."

    def open_chest(self) -> str:
        """Open the chest behind the door."""
        if not self._is_unlocked or ROOMS[self._place] != "cellar":
            return f"There is no chest here. {self._look()}"
        self.done = True
        return "The chest is full of gold. You have won."

    def reward(self) -> float:
        """Return the points so far, at most 1."""
        return (self._has_key + self._is_unlocked + self.done) / 3

    def _look(self) -> str:
        key = " A key lies here." if self._place == self._key_room and not self._has_key else ""
        door = " There is a locked door." if ROOMS[self._place] == "cellar" else ""
        return f"You are in the {ROOMS[self._place]}.{key}{door}"
