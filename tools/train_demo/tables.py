# ruff: noqa: E501 (one entry a line)
"""Words that stories are made of: who, where, what. One entry a line, or `_` for the spaces within one."""

from __future__ import annotations


def rows(text: str) -> list[tuple[str, ...]]:
    return [tuple(part.strip() for part in line.split("|")) for line in text.strip().splitlines()]


def words(text: str) -> list[str]:
    return [word.replace("_", " ") for word in text.split()]


GIRLS = words("""Mia Lily Anna Rosa Ella Nina Zoe Lucy Ruby Emma Clara Daisy Grace Ivy Molly Sara Tina Hana Maya Nora
Poppy Stella Wendy Bella Kate Amy Jane Sophie Lena Dora""")
BOYS = words("""Tom Ben Sam Max Leo Jack Finn Noah Otto Pip Theo Oscar Hugo Bruno Felix Charlie Danny Eddie Henry Luke
Milo Peter Rudy Simon Tim Will Alex Bobby Carl Gus""")
KINDS = words("""fox bear rabbit mouse duck frog cat dog squirrel owl hedgehog pony turtle goat lamb kitten puppy bird
penguin lion elephant monkey panda beaver badger hen pig bee snail whale seal deer robot dragon""")
TRAITS = words("little small kind brave shy happy curious clever lazy busy funny quiet gentle young hungry tired")
HOMES = rows("""
in a small house by the sea
in a green forest
on a farm near a river
in a little village
under a big old tree
in a cozy cottage on a hill
near a blue lake
in a tall house in the city
at the edge of a meadow
in a warm cave in the mountains
next to a quiet pond
on a small island
""")
PLACES = rows("""
in the forest
in the garden
at the beach
near the river
in the park
on the hill
behind the house
in the attic
under the bed
at school
at the market
in the snow
in the kitchen
by the old bridge
in the barn
on the way home
""")
THINGS = words("""red_ball shiny_stone golden_key old_map blue_hat small_box silver_bell wooden_boat yellow_kite lost_letter
magic_seed picture_book broken_toy warm_scarf tiny_lamp paper_star glass_jar green_umbrella toy_train music_box drum
teddy_bear white_feather big_pumpkin red_balloon little_egg strange_shell silver_coin old_clock little_bell""")
FOODS = words("""cake apple_pie bread soup pizza pancakes cookies a_sandwich berries honey carrots cheese strawberry_jam
porridge a_salad muffins""")
FEARS = words("""the_dark thunder deep_water the_wind big_dogs high_places loud_noises the_night strangers spiders
the_old_house the_first_day_of_school""")
SKILLS = words("""swim fly sing dance read paint run_fast climb_trees ride_a_bike bake_bread play_the_drum jump_high
whistle count_to_ten skate catch_fish build_a_house grow_flowers tell_jokes fix_toys""")
OTHERS = words("""an_old_man a_lost_kitten a_baby_bird a_sad_friend a_tired_farmer a_hungry_mouse a_little_bee
a_sick_neighbor an_old_turtle a_small_child a_cold_puppy""")
