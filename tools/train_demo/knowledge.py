# ruff: noqa: E501 (one entry a line)
"""The little that the demo model is to know: animals, things, opposites, orders, lists. One entry a line.

`conversations` asks about these in many ways, and every answer about one thing comes from one line: consistent.
"""

from __future__ import annotations

from tools.train_demo.tables import rows, words

# name | plural | legs | size 1 to 9 | color | lives | eats | can, can | cannot, cannot | sound | one more fact
ANIMALS = rows("""
dog | dogs | 4 | 4 | brown | in houses with people | meat | bark, run, swim | fly, talk | woof | Dogs are good friends of people.
cat | cats | 4 | 3 | gray | in houses with people | mice and fish | climb, jump, purr | fly, bark | meow | Cats like to sleep in warm places.
cow | cows | 4 | 7 | black and white | on farms | grass | walk, give milk | fly, climb trees | moo | Cows give us milk.
horse | horses | 4 | 7 | brown | on farms | grass and hay | run fast, jump | fly, lay eggs | neigh | People can ride on horses.
pig | pigs | 4 | 5 | pink | on farms | corn and vegetables | run, swim | fly, lay eggs | oink | Pigs are clever animals.
sheep | sheep | 4 | 5 | white | on farms | grass | walk, give wool | fly, bark | baa | We make warm clothes from the wool of sheep.
goat | goats | 4 | 5 | white | on farms and in the mountains | grass and leaves | climb, jump | fly, lay eggs | maa | Goats can climb steep rocks.
hen | hens | 2 | 3 | brown | on farms | corn | walk, lay eggs | bark, give milk | cluck | Hens lay eggs.
duck | ducks | 2 | 3 | white | near ponds and lakes | plants and small fish | swim, fly, walk | bark, climb trees | quack | Ducks have feathers that stay dry.
owl | owls | 2 | 3 | brown | in forests | mice | fly, see in the dark | bark, swim | hoot | Owls hunt at night.
eagle | eagles | 2 | 4 | brown | in the mountains | fish and small animals | fly high, see far | bark, swim under water | screech | Eagles have very good eyes.
parrot | parrots | 2 | 3 | green | in warm forests | fruit and nuts | fly, copy words | bark, give milk | squawk | Parrots can copy what people say.
penguin | penguins | 2 | 4 | black and white | in cold lands by the sea | fish | swim, walk, dive | fly, bark | honk | Penguins are birds that cannot fly.
bird | birds | 2 | 2 | brown | in nests in the trees | seeds and worms | fly, sing, lay eggs | bark, give milk | tweet | Birds have feathers and two wings.
fish | fish | 0 | 2 | silver | in water | plants and small animals | swim | walk, fly, bark |  | Fish breathe with gills.
shark | sharks | 0 | 8 | gray | in the sea | fish | swim fast | walk, fly |  | Sharks have many sharp teeth.
whale | whales | 0 | 9 | blue | in the sea | tiny sea animals | swim, dive deep | walk, fly | song | Whales are the largest animals of all.
dolphin | dolphins | 0 | 6 | gray | in the sea | fish | swim, jump out of the water | walk, fly | click | Dolphins are very clever.
frog | frogs | 4 | 2 | green | near ponds | insects | jump, swim | fly, bark | croak | Frogs begin their life as tadpoles.
snake | snakes | 0 | 4 | green | in forests and deserts | mice and frogs | crawl, swim | walk, fly | hiss | Snakes have no legs.
turtle | turtles | 4 | 3 | green | in water and on land | plants | swim, walk slowly | fly, run fast |  | Turtles carry a hard shell on their back.
rabbit | rabbits | 4 | 3 | brown | in holes under the ground | grass and carrots | jump, run fast, dig | fly, bark |  | Rabbits have long ears.
mouse | mice | 4 | 1 | gray | in holes and houses | seeds and cheese | run, climb | fly, bark | squeak | Mice are very small.
fox | foxes | 4 | 4 | red | in forests | mice and berries | run, jump, dig | fly, talk | bark | Foxes have a long, soft tail.
wolf | wolves | 4 | 5 | gray | in forests | meat | run, howl | fly, lay eggs | howl | Wolves live in groups.
bear | bears | 4 | 7 | brown | in forests and mountains | berries, fish and honey | climb, swim, run | fly, lay eggs | growl | Many bears sleep all winter.
deer | deer | 4 | 6 | brown | in forests | grass and leaves | run fast, jump | fly, bark |  | Many deer have antlers.
squirrel | squirrels | 4 | 2 | red | in trees | nuts and seeds | climb, jump | bark, swim under water | chatter | Squirrels hide nuts for the winter.
hedgehog | hedgehogs | 4 | 2 | brown | in gardens and forests | insects and worms | roll up into a ball | fly, bark |  | Hedgehogs have many sharp spines.
lion | lions | 4 | 7 | yellow | in Africa | meat | run, roar | fly, lay eggs | roar | Lions are large wild cats.
tiger | tigers | 4 | 7 | orange with black stripes | in forests in Asia | meat | run, swim, roar | fly, lay eggs | roar | Tigers have black stripes.
elephant | elephants | 4 | 8 | gray | in Africa and Asia | grass and leaves | walk, swim | fly, jump | trumpet | Elephants have a long trunk and big ears.
giraffe | giraffes | 4 | 8 | yellow with brown spots | in Africa | leaves | run, reach high trees | fly, bark |  | Giraffes have very long necks.
zebra | zebras | 4 | 7 | black and white | in Africa | grass | run fast | fly, climb trees |  | Zebras have stripes.
monkey | monkeys | 2 | 4 | brown | in warm forests | fruit | climb, swing from trees | fly, lay eggs | chatter | Monkeys like bananas.
panda | pandas | 4 | 6 | black and white | in forests in China | bamboo | climb, roll | fly, bark |  | Pandas eat bamboo all day.
kangaroo | kangaroos | 2 | 6 | brown | in Australia | grass | jump far | fly, climb trees |  | A kangaroo carries its baby in a pouch.
camel | camels | 4 | 7 | brown | in deserts | dry plants | walk far without water | fly, climb trees |  | Camels have humps on their back.
crocodile | crocodiles | 4 | 7 | green | in warm rivers | fish and other animals | swim, bite | fly, bark |  | Crocodiles have strong teeth.
bee | bees | 6 | 1 | yellow and black | in hives | nectar from flowers | fly, make honey | bark, swim | buzz | Bees make honey.
ant | ants | 6 | 1 | black | in nests under the ground | seeds and sweet things | carry heavy things | bark, sing |  | Ants work together.
spider | spiders | 8 | 1 | black | in webs | insects | make webs, climb | fly, bark |  | Spiders make webs.
butterfly | butterflies | 6 | 1 | many colors | in gardens and meadows | nectar from flowers | fly | bark, swim |  | Butterflies were caterpillars before.
snail | snails | 0 | 1 | brown | in gardens | leaves | crawl slowly | fly, run, bark |  | Snails carry their house on their back.
worm | worms | 0 | 1 | pink | in the soil | dead leaves | crawl, dig | fly, walk, bark |  | Worms are good for the soil.
octopus | octopuses | 8 | 4 | red | in the sea | crabs | swim, change color | fly, bark |  | An octopus has eight arms.
""")
# noun as it stands in a sentence | what it is | true adjectives | false adjective: the true one | color | one more fact
THINGS = rows("""
the sun | a star that gives us light and warmth | hot, bright, big | cold: hot, dark: bright, small: very big | yellow | The sun rises in the east.
the moon | a big ball of rock that goes around the Earth | round, far away | hot: cold, flat: round | gray | We see the moon best at night.
a star | a huge ball of hot gas far away in the sky | hot, bright, far away | cold: hot, dark: bright | white | There are more stars than we can count.
the Earth | the planet that we live on | round, big | flat: round, square: round | blue and green | The Earth goes around the sun once a year.
the sky | the space above us | high, wide | low: high, green: blue | blue | At night, the sky is dark.
a cloud | many tiny drops of water in the sky | soft, white | hard: soft, heavy like a stone: light | white | Rain comes from clouds.
rain | water that falls from the clouds | wet | dry: wet | clear | Plants need rain to grow.
snow | soft white ice that falls from the sky | cold, white, soft | hot: cold, black: white, warm: cold | white | You can build a snowman with snow.
ice | water that is frozen | cold, hard | hot: cold, warm: cold, soft: hard | clear | Ice melts when it gets warm.
fire | something that burns | hot, bright, dangerous | cold: hot, wet: hot and dry, safe to touch: dangerous | orange | Never play with fire.
water | a clear liquid that all living things need | wet | dry: wet | clear | We drink water every day.
wind | air that moves | invisible | easy to see: invisible | no color | The wind can turn a windmill.
the sea | a very large body of salt water | deep, salty, wide | sweet: salty, dry: wet, small: very big | blue | Many fish live in the sea.
a river | a long stream of water | wet, long | dry: wet | blue | A river flows to the sea.
a lake | water with land all around it | wet | dry: wet | blue | You can swim in a lake.
a mountain | a very high piece of land | high, big | low: high, small: big, flat: steep | gray | There is often snow on top of a mountain.
a desert | a dry place with little rain | dry, hot | wet: dry, rainy: dry | yellow | Camels live in the desert.
a forest | a place with many trees | green, big | empty: full of trees | green | Many animals live in the forest.
an island | land with water all around it | surrounded by water | under water: above the water | green | You need a boat to reach an island.
a tree | a tall plant with a trunk and leaves | tall, alive | an animal: a plant, soft: hard | green | Birds build nests in trees.
a flower | the colorful part of a plant | pretty, alive | ugly: pretty, an animal: part of a plant | many colors | Bees visit flowers.
grass | a green plant that covers the ground | green, soft | blue: green, hard: soft, red: green | green | Cows eat grass.
a leaf | a flat part of a plant | green, thin | thick: thin | green | In autumn, leaves turn red and fall.
a seed | a small thing that grows into a plant | small | big: small | brown | A seed needs water and soil.
a stone | a hard piece of rock | hard, heavy | soft: hard, alive: not alive | gray | You cannot eat stones.
an apple | a round fruit that grows on a tree | sweet, round, healthy | square: round, salty: sweet, an animal: a fruit | red | You can make juice from apples.
a banana | a long fruit with a thick skin | sweet, long, yellow | round: long, blue: yellow, a vegetable: a fruit | yellow | Monkeys like bananas.
an orange | a round fruit with sweet juice | sweet, round | square: round, blue: orange | orange | Oranges have many vitamins.
a lemon | a yellow fruit | sour, yellow | sweet: sour, blue: yellow | yellow | You can make lemonade from lemons.
a strawberry | a small red fruit | sweet, red | sour like a lemon: sweet, blue: red | red | Strawberries grow near the ground.
a carrot | a vegetable that grows under the ground | healthy, orange | blue: orange, a fruit: a vegetable | orange | Rabbits like carrots.
a tomato | a red, juicy fruit that we cook like a vegetable | red, juicy | blue: red, dry: juicy | red | Tomatoes are good in a salad.
a potato | a vegetable that grows under the ground | brown, healthy | a fruit: a vegetable, sweet like honey: not sweet | brown | You must cook a potato before you eat it.
bread | a food made from flour and water | soft, good to eat | a drink: a food, made of stone: made from flour | brown | Bread is baked in an oven.
cheese | a food made from milk | yellow, good to eat | a drink: a food, made from wood: made from milk | yellow | Mice are said to like cheese.
milk | a white drink that comes from cows | white, healthy | black: white, dry: wet | white | Milk is good for your bones.
honey | a sweet food that bees make | sweet, sticky | salty: sweet, sour: sweet | golden | Bears like honey.
sugar | a sweet white powder | sweet, white | salty: sweet, sour: sweet | white | Too much sugar is bad for your teeth.
salt | white grains that make food salty | salty, white | sweet: salty | white | The sea is full of salt.
ice cream | a cold, sweet food | cold, sweet | hot: cold, warm: cold, salty: sweet | many colors | Ice cream melts in the sun.
soup | a warm food that you eat with a spoon | warm, wet | dry: wet | many colors | Soup is good when you have a cold.
a house | a building where people live | big, useful | alive: not alive | many colors | A house has doors and windows.
a school | a place where children learn | useful | an animal: a place | many colors | Teachers work at a school.
a book | many pages with words and pictures | useful, quiet | loud: quiet, alive: not alive | many colors | You can borrow books from a library.
a car | a machine with four wheels | fast, heavy | slow: fast, alive: not alive | many colors | A car drives on the road.
a bike | a thing with two wheels that you ride | useful | alive: not alive, a plane: a bike with two wheels | many colors | You ride a bike with your feet.
a train | a long machine that runs on rails | long, fast | short: long, slow: fast | many colors | Many people can ride on a train.
a plane | a machine that flies through the air | fast, big | slow: fast, small: big | white | A plane has two wings.
a boat | a thing that floats on water | useful | a fish: a thing made by people | many colors | Some boats have sails.
a clock | a thing that shows the time | useful | alive: not alive | many colors | A clock has two hands.
a key | a small piece of metal that opens a lock | small, hard | soft: hard, big: small | silver | Do not lose your key.
a lamp | a thing that gives light | bright | dark: bright | many colors | You turn on a lamp when it is dark.
a ball | a round thing to play with | round | square: round, flat: round | many colors | You can throw, kick and catch a ball.
a chair | a thing to sit on | useful | alive: not alive | brown | Most chairs have four legs.
a bed | a thing to sleep on | soft | hard like a stone: soft | many colors | You sleep in a bed at night.
a pillow | a soft thing for your head | soft | hard: soft | white | You put your head on a pillow.
a feather | a light part of a bird | light, soft | heavy: light, hard: soft | white | A feather floats in the air.
a knife | a tool that you use to cut things | sharp | soft: hard, blunt: sharp | silver | Be careful with a knife.
an umbrella | a thing that keeps you dry in the rain | useful | good to eat: not food | many colors | You open an umbrella when it rains.
a coat | a thing that you wear when it is cold | warm | cold: warm | many colors | A coat keeps you warm in winter.
winter | the coldest season of the year | cold | hot: cold, warm: cold | white | In winter, the days are short.
summer | the warmest season of the year | hot, warm | cold: warm, the coldest season: the warmest season | green | In summer, the days are long.
spring | the season when flowers begin to grow | mild | the coldest season: mild | green | Spring comes after winter.
autumn | the season when leaves fall | cool | the hottest season: cool | red and yellow | Autumn comes after summer.
the night | the time when it is dark | dark, quiet | bright: dark | black | At night, we sleep.
a robot | a machine that can do work | useful | alive: not alive, an animal: a machine | silver | Some robots look a little like people.
a computer | a machine that calculates and shows things on a screen | fast, useful | alive: not alive | gray | I run on a computer.
a friend | a person you like and trust | kind | a bad thing: a good thing | - | A good friend listens to you.
a teacher | a person who helps children learn | kind, helpful | an animal: a person | - | Teachers work at a school.
a doctor | a person who helps sick people | helpful | an animal: a person | - | Go to a doctor when you are sick.
a farmer | a person who grows food and keeps animals | busy | an animal: a person | - | Farmers get up early.
a baker | a person who makes bread and cakes | busy | an animal: a person | - | Bakers work at night.
music | sounds that are nice to hear | nice | something to eat: something to hear | - | You can dance to music.
a dream | a story that you see while you sleep | strange | real: not real | - | Everybody dreams.
""")
OPPOSITES = [
    pair.split(":")
    for pair in words("""hot:cold big:small happy:sad day:night up:down left:right old:young new:old fast:slow tall:short long:short light:heavy
bright:dark wet:dry hard:soft full:empty open:closed rich:poor strong:weak good:bad early:late loud:quiet clean:dirty near:far high:low
thick:thin sweet:sour first:last win:lose begin:end summer:winter black:white yes:no inside:outside above:below easy:difficult
true:false kind:mean brave:afraid push:pull give:take laugh:cry""")
]
# question | answer | yes or no, and why
WHY = rows("""
Why do we sleep? | We sleep because our bodies and minds need rest.
Why do we eat? | We eat because food gives us energy.
Why do we drink water? | We drink water because our bodies need it to work well.
Why is the sky blue? | The sky is blue because the air spreads the blue light of the sun.
Why does it rain? | It rains when the drops of water in the clouds become too heavy.
Why is the sea salty? | The sea is salty because rivers carry salt from the land into it.
Why is it dark at night? | It is dark at night because our side of the Earth turns away from the sun.
Why do leaves fall in autumn? | Leaves fall because the tree gets ready for the winter.
Why is it good to share? | It is good to share because it makes other people happy.
Why is it good to read? | It is good to read because you learn new things.
Why should I say thank you? | You should say thank you because it is kind and polite.
Why should I say sorry? | You say sorry to show that you did not want to hurt someone.
Why should I wash my hands? | You should wash your hands to keep away germs.
Why should I brush my teeth? | You should brush your teeth to keep them clean and strong.
Why do we go to school? | We go to school to learn to read, write and count.
Why do people work? | People work to earn money and to help others.
Why do cats purr? | Cats purr when they feel happy and safe.
Why do dogs bark? | Dogs bark to tell us something.
Why do birds sing? | Birds sing to call each other.
Why do birds fly south in winter? | Birds fly south because it is warmer there and they find food.
Why do bees like flowers? | Bees like flowers because they find sweet nectar in them.
Why do we need trees? | We need trees because they clean the air.
Why do we need the sun? | We need the sun because it gives us light and warmth.
Why do we cry? | We cry when we are sad, hurt, or very happy.
Why do we laugh? | We laugh when something is funny or makes us happy.
Why do boats float? | A boat floats because it pushes the water away and is lighter than that water.
Why does ice melt? | Ice melts because it gets warm.
Why do we wear coats? | We wear coats because they keep us warm.
Where does milk come from? | Milk comes from cows.
Where does bread come from? | Bread is made from flour, and flour comes from wheat.
Where does honey come from? | Honey comes from bees.
Where do eggs come from? | Eggs come from hens.
Where does rain come from? | Rain comes from clouds.
Where does wool come from? | Wool comes from sheep.
Where does the sun go at night? | The sun does not go away at night. Our side of the Earth turns away from it.
Where do apples grow? | Apples grow on trees.
Where do potatoes grow? | Potatoes grow under the ground.
What can I do on a rainy day? | On a rainy day, you can read a book or draw a picture.
What can I do on a sunny day? | On a sunny day, you can play outside or go for a walk.
What can I do in the snow? | In the snow, you can build a snowman or ride on a sled.
What can I do when I am bored? | When you are bored, you can draw, read or play a game.
What can I do when I am sad? | When you are sad, you can talk to a friend or take a walk.
What can I do when I am angry? | When you are angry, you can take a deep breath and count to ten.
What can I do when I am afraid? | When you are afraid, you can ask someone to hold your hand.
What should I eat for breakfast? | For breakfast, you can eat bread, eggs or fruit.
What should I wear in winter? | In winter, you should wear a warm coat, a hat and gloves.
What should I wear in summer? | In summer, you should wear light clothes and a hat.
What should I take to the beach? | Take a towel, a hat and some water to the beach.
What makes a good friend? | A good friend is kind, listens to you and helps you.
What do plants need? | Plants need water, light and soil.
What do we need to live? | We need air, water, food and sleep.
How do plants grow? | Plants grow from seeds when they have water, soil and light.
How do fish breathe? | Fish breathe with their gills.
How do birds fly? | Birds fly by moving their wings.
How do I make a friend? | Smile, say hello, and ask the other person to do something together.
How do I fall asleep? | Lie down, close your eyes and think of something nice.
When do we see the stars? | We see the stars at night when the sky is clear.
When do flowers grow? | Most flowers grow in spring and summer.
When do birds sing? | Many birds sing early in the morning.
What do you need to bake a cake? | You need flour, eggs, sugar, butter and milk.
What color do you get from blue and yellow? | Blue and yellow make green.
What color do you get from red and yellow? | Red and yellow make orange.
What color do you get from red and blue? | Red and blue make purple.
What color do you get from black and white? | Black and white make gray.
What is the largest animal? | The largest animal is the blue whale.
What is the tallest animal? | The tallest animal is the giraffe.
What is the fastest animal on land? | The fastest animal on land is the cheetah.
How many days are in a week? | There are seven days in a week.
How many months are in a year? | There are twelve months in a year.
How many seasons are there? | There are four seasons: spring, summer, autumn and winter.
How many hours are in a day? | There are twenty-four hours in a day.
How many minutes are in an hour? | There are sixty minutes in an hour.
How many fingers do you have on one hand? | A person has five fingers on one hand.
How many wheels does a car have? | A car has four wheels.
How many wheels does a bike have? | A bike has two wheels.
How many letters are in the alphabet? | There are twenty-six letters in the English alphabet.
""")
# question | Yes or No | why
YES_NO = rows("""
Is it good to share? | Yes | Sharing makes other people happy.
Is it good to lie? | No | It is better to tell the truth.
Should I wash my hands? | Yes | Clean hands keep germs away.
Should I brush my teeth? | Yes | It keeps them clean and strong.
Should I eat only sweets? | No | Your body needs fruit and vegetables, too.
Can people fly? | No | People have no wings, but they can fly in a plane.
Can people swim? | Yes | Most people can learn to swim.
Can people live without water? | No | Everyone needs water to live.
Can plants grow without water? | No | Plants need water to grow.
Can trees talk? | No | Trees are alive, but they cannot talk.
Does the sun shine at night? | No | At night, our side of the Earth turns away from the sun.
Do we need sleep? | Yes | Our bodies and minds need rest.
Do cars eat grass? | No | Cars are machines and do not eat.
Do stones grow? | No | Stones are not alive.
Do all birds fly? | No | Penguins are birds, but they cannot fly.
Does ice melt in the sun? | Yes | The sun is warm, and ice turns into water.
Does water freeze when it is cold? | Yes | Very cold water turns into ice.
Is the Earth round? | Yes | The Earth is round like a ball.
Is the Earth flat? | No | The Earth is round like a ball.
Is the moon made of cheese? | No | The moon is made of rock.
Is a whale a fish? | No | A whale lives in the sea, but it breathes air.
Is a penguin a bird? | Yes | It has feathers and lays eggs, but it cannot fly.
Is a bat a bird? | No | A bat has fur and no feathers.
Is a spider an insect? | No | A spider has eight legs, and insects have six.
Is a tomato a fruit? | Yes | A tomato has seeds, so it is a fruit, but we cook it like a vegetable.
Is reading fun? | Yes | In books, you can meet new people and places.
Are dragons real? | No | Dragons live only in stories.
Are monsters real? | No | Monsters live only in stories.
Are unicorns real? | No | Unicorns live only in stories.
Are ghosts real? | No | Ghosts live only in stories.
Are bees useful? | Yes | Bees make honey and help flowers.
Are vegetables healthy? | Yes | They give your body what it needs.
Is candy healthy? | No | It has too much sugar.
Is it cold in winter? | Yes | Winter is the coldest season.
Is it warm in summer? | Yes | Summer is the warmest season.
Is it dark at night? | Yes | At night, the sun does not shine on us.
Is Monday before Tuesday? | Yes | Tuesday comes right after Monday.
Is one more than two? | No | One is less than two.
Is ten more than five? | Yes | Ten is five more than five.
""")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
NUMBERS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty"
)
LISTS = {
    "animals": [row[0] for row in ANIMALS],
    "farm animals": words("cow pig sheep goat hen horse duck donkey"),
    "wild animals": words("lion tiger bear wolf elephant zebra fox deer giraffe"),
    "pets": words("dog cat rabbit hamster goldfish parrot turtle pony"),
    "birds": words("owl eagle duck parrot penguin robin swan hen crow"),
    "insects": words("bee ant butterfly fly beetle ladybug mosquito"),
    "sea animals": words("whale shark dolphin octopus crab seal starfish"),
    "animals that can fly": words("owl eagle bee butterfly parrot bat duck"),
    "animals that can swim": words("fish duck whale frog dolphin penguin seal"),
    "fruits": words("apple banana orange pear cherry plum grape lemon peach strawberry melon"),
    "vegetables": words("carrot potato onion tomato bean pea cabbage pumpkin cucumber"),
    "colors": words("red blue green yellow orange purple black white pink brown gray"),
    "drinks": words("water milk tea juice lemonade coffee cocoa"),
    "foods": words("bread cheese soup rice pizza cake salad noodles"),
    "toys": words("ball doll kite puzzle teddy_bear train drum robot"),
    "flowers": words("rose tulip daisy sunflower lily violet"),
    "trees": words("oak pine apple_tree birch maple palm"),
    "things in a kitchen": words("spoon knife pot cup plate oven bowl"),
    "things in a school": words("book pen desk chair blackboard ruler map"),
    "clothes": words("hat coat shirt sock shoe scarf dress glove"),
    "parts of the body": words("head arm leg hand foot nose ear eye mouth"),
    "jobs": words("teacher doctor farmer baker cook painter firefighter pilot"),
    "sports": words("football tennis swimming running skating basketball"),
    "instruments": words("drum piano violin guitar flute trumpet"),
    "seasons": words("spring summer autumn winter"),
    "days of the week": DAYS,
    "months": MONTHS,
    "shapes": words("circle square triangle star heart oval"),
    "girls' names": words("Mia Lily Anna Rosa Ella Nina Zoe Lucy Ruby Emma Clara"),
    "boys' names": words("Tom Ben Sam Max Leo Jack Finn Noah Otto Theo Oscar"),
    "names for a dog": words("Max Bella Rocky Luna Buddy Charlie Daisy"),
    "names for a cat": words("Luna Tiger Milo Snowy Felix Mimi Shadow"),
    "things that are red": words("apple strawberry tomato rose fire_truck"),
    "things that are round": words("ball orange coin wheel moon plate"),
    "things that are cold": words("ice snow ice_cream winter"),
    "things that are hot": words("fire the_sun tea an_oven"),
}
