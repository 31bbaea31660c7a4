import random

import pytest

from minillm.memory.block_pool import BlockPool, IntegrityError


def test_blocks_are_handed_out_in_order_of_release():
    pool = BlockPool(4)
    assert pool.allocate(3) == [1, 2, 3]
    pool.release([2])
    pool.release([1])
    assert pool.allocate(3) == [4, 2, 1]
    assert pool.num_free == 0


def test_exactly_all_and_one_more():
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="4 blocks asked for, 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3, "a refused request takes nothing"
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(0) == []
    with pytest.raises(ValueError, match="1 blocks asked for, 0 are free"):
        pool.allocate(1)


def test_a_block_is_free_when_the_last_holder_lets_go():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    assert pool.check_integrity(blocks)
    pool.release(blocks)
    assert pool.num_free == 2
    assert pool.check_integrity([])


def test_the_null_block_is_never_handed_out_nor_held():
    pool = BlockPool(5)
    assert 0 not in pool.allocate(5)
    with pytest.raises(IntegrityError, match="block 0"):
        pool.hold([0])
    with pytest.raises(IntegrityError, match="block 0"):
        pool.release([0])


def test_free_blocks_can_neither_be_held_nor_released():
    pool = BlockPool(2)
    with pytest.raises(IntegrityError, match="block 1 is held again but free"):
        pool.hold([1])
    with pytest.raises(IntegrityError, match="block 1 is released but free"):
        pool.release([1])
    blocks = pool.allocate(1)
    with pytest.raises(IntegrityError, match="block 1 is released but free"):
        pool.release(blocks * 2)


def leak(pool: BlockPool, owned: list[int]) -> None:
    pool.allocate(1)


def lost_from_the_free_list(pool: BlockPool, owned: list[int]) -> None:
    pool._free.pop()


def twice_in_the_free_list(pool: BlockPool, owned: list[int]) -> None:
    pool._free.append(pool._free[0])


def in_two_tables(pool: BlockPool, owned: list[int]) -> None:
    owned.append(owned[0])


def one_reference_too_many(pool: BlockPool, owned: list[int]) -> None:
    pool.hold(owned[:1])


def freed_but_in_a_table(pool: BlockPool, owned: list[int]) -> None:
    pool.release(owned[:1])


def null_block_owned(pool: BlockPool, owned: list[int]) -> None:
    owned.append(0)


def no_such_block(pool: BlockPool, owned: list[int]) -> None:
    owned.append(pool.num_usable + 1)


def negative_block(pool: BlockPool, owned: list[int]) -> None:
    owned.append(-1)


FAULTS = [
    leak,
    lost_from_the_free_list,
    twice_in_the_free_list,
    in_two_tables,
    one_reference_too_many,
    freed_but_in_a_table,
    null_block_owned,
    no_such_block,
    negative_block,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault):
    pool = BlockPool(6)
    owned = pool.allocate(3)
    assert pool.check_integrity(owned)
    fault(pool, owned)
    with pytest.raises(IntegrityError):
        pool.check_integrity(owned)


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_against_a_list_of_references(seed):
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(1, 12))
    held: list[int] = []  # one entry a reference
    for _ in range(300):
        free = pool.num_usable - len(set(held))
        choice = rng.random()
        if choice < 0.4:
            count = rng.randint(0, 4)
            if count > free:
                with pytest.raises(ValueError, match=f"{count} blocks asked for"):
                    pool.allocate(count)
            else:
                new = pool.allocate(count)
                assert len(set(new)) == count
                assert not set(new) & set(held)
                held += new
        elif held and choice < 0.6:
            block = rng.choice(held)
            pool.hold([block])
            held.append(block)
        elif held:
            block = held.pop(rng.randrange(len(held)))
            pool.release([block])
        assert pool.num_free == pool.num_usable - len(set(held))
        assert pool.check_integrity(held)
